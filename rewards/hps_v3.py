"""Human Preference Score v3 (arXiv 2508.03789): Qwen2-VL-7B with a head for mean and deviation.

The authors' package ``hpsv3`` runs it. That needs transformers 4.45.2, unlike the rest,
so its actors have an environment of their own (docs/rewards.md).
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
    """The mean of the score's distribution; its deviation is the part ``sigma``.

    ``config`` is the package's own file of settings, for another place of the base model.
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
                f"{error}: give its actors an environment with hpsv3==1.0.0: docs/rewards.md"
            ) from None
        file = str(locate(checkpoint, FILES))
        self._batch_size = batch_size
        self._model: Any = HPSv3RewardInferencer(config, file, device=device)
        self.parts: dict[str, np.ndarray] = {}

    @staticmethod
    def check(settings: Settings) -> None:
        """Raises ScorerSetupError for settings that can be seen to be wrong without the model."""
        require_count("batch_size", settings["batch_size"], 1)
        # other files are read by unpickling
        if settings["checkpoint"].endswith((".pt", ".pth", ".bin", ".ckpt")):
            raise ScorerSetupError(
                f"checkpoint is {settings['checkpoint']!r}: only safetensors are read"
            )

    @classmethod
    def model_bytes(cls, settings: Settings) -> int | None:
        """The size of the file, if it is here: it holds all weights in the dtype they run in."""
        file = local(settings.get("checkpoint", "MizzenAI/HPSv3"), FILES)
        return file.stat().st_size if file else None

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        """uint8 [B, 3, H, W] -> float32 [B]. Raises ScorerError for another form of answer."""
        require_images(images, prompts, metadata)
        import torch

        shown = [to_pil(image) for image in images]
        found: list[np.ndarray] = []
        with torch.inference_mode():
            for first in range(0, len(shown), self._batch_size):
                rows = slice(first, first + self._batch_size)
                answer = self._model.reward(shown[rows], list(prompts[rows]))
                found.append(answer.float().cpu().numpy())
        scores = np.concatenate(found)
        if scores.shape != (len(images), 2):
            raise ScorerError(
                f"hpsv3 answered {list(scores.shape)} for {len(images)} images: mean and deviation"
                " of each were expected"
            )
        self.parts = {"sigma": scores[:, 1]}
        return scores[:, 0]
