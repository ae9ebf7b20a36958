"""JPEG size as a reward, the classic first test of reward training (DDPO, arXiv 2305.13301)."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np

from records.images import to_pil
from rewards.base import BuiltIn, Metadata, ScorerSetupError, Settings, require_count

QUALITY = 95
BYTES_PER_KB = 1000.0


def jpeg_kilobytes(images: np.ndarray, quality: int) -> np.ndarray:
    """Size in kB (1000 bytes) of each image uint8 [B, 3, H, W] as a JPEG file: float32 [B]."""
    sizes = []
    for image in images:
        buffer = io.BytesIO()
        to_pil(image).save(buffer, format="JPEG", quality=quality)
        sizes.append(buffer.tell() / BYTES_PER_KB)
    return np.asarray(sizes, dtype=np.float32)


class JpegIncompressibility(BuiltIn):
    """Reward = JPEG size in kB: detail pays. ``quality`` is Pillow's, 1 to 95."""

    sign = 1.0

    def __init__(self, quality: int = QUALITY) -> None:
        self.check({"quality": quality})
        self.quality = quality

    @staticmethod
    def check(settings: Settings) -> None:
        """Raises ScorerSetupError for a quality that Pillow does not have."""
        require_count("quality", quality := settings["quality"], 1)
        if quality > 95:
            raise ScorerSetupError(f"quality is {quality}: use 1 to 95")

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        """uint8 [B, 3, H, W] -> float32 [B]; prompts and metadata are not looked at."""
        return np.float32(self.sign) * jpeg_kilobytes(images, self.quality)


class JpegCompressibility(JpegIncompressibility):
    """Reward = minus the JPEG size in kB: flat images pay."""

    sign = -1.0
