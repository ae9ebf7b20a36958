"""Base class of learned scorers: image i is scored with prompt i, in batches of limited size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from records.weights import DTYPES
from rewards.base import (
    BuiltIn,
    Effort,
    Metadata,
    ScorerSetupError,
    Settings,
    require_count,
    require_images,
    require_one_of,
)


class PairedScorer(BuiltIn, ABC):
    """Scores pairs of image i and prompt i in batches; never all images with all prompts.

    ``device`` None means the GPU if torch sees one; the reward service passes the device of its
    actors. Scores are computed in FP32 from features in ``dtype``.
    """

    tower: ClassVar[tuple[int, int, int] | None] = None
    """Width, layers and tokens of the published model's image encoder."""
    parameters: ClassVar[int] = 0
    """Number of parameters of the published model; 0: count them, which imports large libraries."""

    def __init__(
        self, batch_size: int = 16, dtype: str = "fp32", device: str | None = None
    ) -> None:
        PairedScorer.check({"batch_size": batch_size, "dtype": dtype, "device": device})
        self.batch_size, self.dtype = batch_size, DTYPES[dtype]
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @staticmethod
    def check(settings: Settings) -> None:
        """Raise ScorerSetupError for an invalid batch size, precision or device."""
        require_count("batch_size", settings["batch_size"], 1)
        require_one_of("dtype", settings["dtype"], DTYPES)
        try:
            torch.device(settings["device"] or "cpu")
        except (RuntimeError, TypeError):
            raise ScorerSetupError(
                f"device is {settings['device']!r}: use cpu, cuda or cuda:N"
            ) from None

    @classmethod
    @abstractmethod
    def network(cls, settings: Settings) -> torch.nn.Module | None:
        """Return the model of these settings without weights; None if only a checkpoint tells."""

    @classmethod
    def is_published(cls, settings: Settings) -> bool:
        """Return True if these settings are known to mean the published architecture."""
        return not settings.get("architecture")

    @classmethod
    def model_bytes(cls, settings: Settings) -> int | None:
        """Return the bytes of the model, counted with tensors on the meta device if not known."""
        width = DTYPES.get(str(settings.get("dtype")), torch.float32).itemsize
        if cls.parameters and cls.is_published(settings):
            return cls.parameters * width
        with torch.device("meta"):
            model = cls.network(settings)
        if model is None:
            return None
        return sum(parameter.numel() for parameter in model.parameters()) * width

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        """Score uint8 [B, 3, H, W] with B prompts: float32 [B]; ``metadata`` is not used."""
        require_images(images, prompts, metadata)
        if not len(images):
            return np.zeros(0, np.float32)
        with torch.inference_mode():
            pixels = self.pixels(images)
            parts = [
                self.score(
                    pixels[first : first + self.batch_size],
                    list(prompts[first : first + self.batch_size]),
                )
                for first in range(0, len(images), self.batch_size)
            ]
        return torch.cat(parts).float().cpu().numpy()

    @classmethod
    def effort(cls, settings: Settings, height: int, width: int) -> Effort:
        """Return the cost of the published image encoder, which does not depend on image size.

        The text encoder, with less than 5 % of the operations, is left out. For other models the
        cost is unknown, hence zero.
        """
        small = str(settings.get("checkpoint", "")).startswith("shapes/")
        if cls.tower is None or small or settings.get("architecture"):
            return Effort()
        features, layers, tokens = cls.tower
        flops = layers * tokens * (24 * features**2 + 4 * tokens * features)
        return Effort(float(flops), str(settings.get("dtype", "fp32")))

    @abstractmethod
    def pixels(self, images: np.ndarray) -> torch.Tensor:
        """Preprocess uint8 [B, 3, H, W] as in training: float32 [B, 3, S, S] on the CPU."""

    @abstractmethod
    def score(self, pixels: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """Score one batch: float32 [B, 3, S, S] and B prompts to [B]."""


def cosine(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the cosine of each row in FP32: [B, D] and [B, D] to [B].

    NaN if a vector is zero, which damaged weights may cause: that is no score.
    """
    nonzero = left.any(-1) & right.any(-1)
    cosines = torch.nn.functional.cosine_similarity(left.float(), right.float(), dim=-1)
    return torch.where(nonzero, cosines, torch.nan)


def distinct(prompts: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return (distinct prompts, index of each prompt among them), to encode each text once."""
    once = list(dict.fromkeys(prompts))
    places = {prompt: place for place, prompt in enumerate(once)}
    return once, [places[prompt] for prompt in prompts]
