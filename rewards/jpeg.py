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
    """Return the JPEG size in kB (1000 bytes) of each image of uint8 [B, 3, H, W]: float32 [B]."""
    sizes = []
    for image in images:
        buffer = io.BytesIO()
        to_pil(image).save(buffer, format="JPEG", quality=quality)
        sizes.append(buffer.tell() / BYTES_PER_KB)
    return np.asarray(sizes, dtype=np.float32)


class JpegIncompressibility(BuiltIn):
    """JPEG size in kB, which rewards detail. ``quality`` is Pillow's, 1 to 95."""

    sign = 1.0

    def __init__(self, quality: int = QUALITY) -> None:
        self.check({"quality": quality})
        self.quality = quality

    @staticmethod
    def check(settings: Settings) -> None:
        """Raise ScorerSetupError unless ``quality`` is an integer from 1 to 95."""
        require_count("quality", quality := settings["quality"], 1)
        if quality > 95:
            raise ScorerSetupError(f"quality is {quality}: use 1 to 95")

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        """Score uint8 [B, 3, H, W] as float32 [B]; prompts and metadata are ignored."""
        return np.float32(self.sign) * jpeg_kilobytes(images, self.quality)


class JpegCompressibility(JpegIncompressibility):
    """Negative JPEG size in kB, which rewards flat images."""

    sign = -1.0
