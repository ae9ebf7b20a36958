"""A scorer in one file, as a user would add one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rewards.base import BuiltIn, Effort, Metadata, ScorerSetupError, Settings, require_images


class Redness(BuiltIn):
    """Mean of the red channel, in [0, 1], times ``gain``; it declares 1000 weights."""

    paths: Mapping[str, tuple[str, ...]] = {"table": ("red.txt",)}

    def __init__(self, gain: float = 1.0, table: str | None = None) -> None:
        self.gain = gain

    @staticmethod
    def check(settings: Settings) -> None:
        if settings["gain"] <= 0:
            raise ScorerSetupError(f"gain is {settings['gain']}: use a positive number")

    @classmethod
    def model_bytes(cls, settings: Settings) -> int | None:
        return 4 * 1000

    @classmethod
    def effort(cls, settings: Settings, height: int, width: int) -> Effort:
        return Effort(2.0 * height * width, "bf16", 4000.0)

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        require_images(images, prompts, metadata)
        return (images[:, 0].mean((1, 2)) / 255 * self.gain).astype(np.float32)
