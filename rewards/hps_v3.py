"""Human Preference Score v3 (arXiv 2508.03789): Qwen2-VL-7B with a head for mean and deviation.

It runs in the authors' package ``hpsv3``, which needs transformers 4.45.2, unlike the rest of
Sol-RL; its actors therefore have an environment of their own (docs/rewards.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from records.images import to_pil
from rewards.base import (
    BuiltIn,
    Metadata,
    ScorerError,
    ScorerSetupError,
    Settings,
    require_count,
    require_images,
)
from rewards.checkpoints import local, locate

FILES = ("HPSv3.safetensors",)


class HPSv3(BuiltIn):
    """Mean of the predicted score distribution; its deviation is the part ``sigma``.

    ``config`` is a configuration file of the package, for a base model in another location.
    """

    paths: ClassVar[Mapping[str, tuple[str, ...]]] = {"checkpoint": FILES}

    def __init__(
        self,
        checkpoint: str = "MizzenAI/HPSv3",
        config: str | None = None,
        batch_size: int = 8,
        device: str = "cpu",
    ) -> None:
        self.check({"checkpoint": checkpoint, "batch_size": batch_size})
        try:
            from hpsv3 import HPSv3RewardInferencer  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ScorerSetupError(
                f"{error}: give its actors an environment with hpsv3==1.0.0, see docs/rewards.md"
            ) from None
        file = str(locate(checkpoint, FILES))
        self._batch_size = batch_size
        self._model: Any = HPSv3RewardInferencer(config, file, device=device)
        self.parts: dict[str, np.ndarray] = {}

    @staticmethod
    def check(settings: Settings) -> None:
        """Raise ScorerSetupError if settings are invalid, as far as known without the model."""
        require_count("batch_size", settings["batch_size"], 1)
        # the package reads other files by unpickling, which can run code
        if settings["checkpoint"].endswith((".pt", ".pth", ".bin", ".ckpt")):
            raise ScorerSetupError(
                f"checkpoint is {settings['checkpoint']!r}: only safetensors files are read"
            )

    @classmethod
    def model_bytes(cls, settings: Settings) -> int | None:
        """Return the size of the local file, which holds all weights in the dtype they run in."""
        file = local(settings.get("checkpoint", "MizzenAI/HPSv3"), FILES)
        return file.stat().st_size if file else None

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        """Score uint8 [B, 3, H, W] as float32 [B]. Raises ScorerError for an unexpected result."""
        require_images(images, prompts, metadata)
        import torch

        pil_images = [to_pil(image) for image in images]
        batches: list[np.ndarray] = []
        with torch.inference_mode():
            for first in range(0, len(pil_images), self._batch_size):
                rows = slice(first, first + self._batch_size)
                result = self._model.reward(pil_images[rows], list(prompts[rows]))
                batches.append(result.float().cpu().numpy())
        scores = np.concatenate(batches)
        if scores.shape != (len(images), 2):
            raise ScorerError(
                f"hpsv3 answered {list(scores.shape)} for {len(images)} images: expected the mean"
                " and deviation of each"
            )
        self.parts = {"sigma": scores[:, 1]}
        return scores[:, 0]
