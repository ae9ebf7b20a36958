"""What learned scorers share: image i is scored with prompt i, in batches of limited size."""

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
    """Batches images and prompts, image i with prompt i; never every image with every prompt.

    ``device`` None is the GPU where torch sees one; the reward service gives the device of its
    actors. A batch's scores are computed in FP32 from features in ``dtype``.
    """

    tower: ClassVar[tuple[int, int, int] | None] = None
    """Width, layers and tokens of the published model's image encoder."""

    def __init__(
        self, batch_size: int = 16, dtype: str = "fp32", device: str | None = None
    ) -> None:
        PairedScorer.check({"batch_size": batch_size, "dtype": dtype, "device": device})
        self.batch_size, self.dtype = batch_size, DTYPES[dtype]
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @staticmethod
    def check(settings: Settings) -> None:
        """Raises ScorerSetupError for a batch size, precision or device that is none."""
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
        """The model of these settings, no weights loaded; None where a checkpoint would tell."""

    @classmethod
    def model_bytes(cls, settings: Settings) -> int | None:
        """Counted on the architecture, on tensors without data."""
        with torch.device("meta"):
            model = cls.network(settings)
        width = DTYPES.get(str(settings.get("dtype")), torch.float32).itemsize
        if model is None:
            return None
        return sum(parameter.numel() for parameter in model.parameters()) * width

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        """uint8 [B, 3, H, W] and B prompts -> float32 [B]; metadata is not looked at."""
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
        """Of the published image encoder, whatever the image's size; the text encoder, with less
        than 5 % of the operations, is left out. Of other models nothing is known.
        """
        small = str(settings.get("checkpoint", "")).startswith("shapes/")
        if cls.tower is None or small or settings.get("architecture"):
            return Effort()
        features, layers, tokens = cls.tower
        flops = layers * tokens * (24 * features**2 + 4 * tokens * features)
        return Effort(float(flops), str(settings.get("dtype", "fp32")))

    @abstractmethod
    def pixels(self, images: np.ndarray) -> torch.Tensor:
        """uint8 [B, 3, H, W] -> float32 [B, 3, S, S] on the CPU, as the model was trained."""

    @abstractmethod
    def score(self, pixels: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """One batch: float32 [B, 3, S, S] and B prompts -> [B]."""


def cosine(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Row by row, in FP32: [B, D] and [B, D] -> [B]; NaN where one of them is zero, as damaged
    weights may make it: that is no score.
    """
    there = left.any(-1) & right.any(-1)
    found = torch.nn.functional.cosine_similarity(left.float(), right.float(), dim=-1)
    return torch.where(there, found, torch.nan)


def distinct(prompts: Sequence[str]) -> tuple[list[str], list[int]]:
    """(each different prompt once, every prompt's place among them): a text is encoded once."""
    once = list(dict.fromkeys(prompts))
    places = {prompt: place for place, prompt in enumerate(once)}
    return once, [places[prompt] for prompt in prompts]
