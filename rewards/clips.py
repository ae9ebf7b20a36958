"""Clips for scorers of images: frames of each clip are scored, and their mean is the clip's score.

A scorer with an attribute ``clips`` that is true takes clips, uint8 [B, F, 3, H, W], itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rewards.base import Metadata


def scored_frames(frames: int, wanted: int | None) -> list[int]:
    """Which of a clip's frames are scored: those in the middle of ``wanted`` equal parts of it.

    All of them where there are no more, or None are wanted.
    """
    if wanted is None or wanted >= frames:
        return list(range(frames))
    return [(2 * part + 1) * frames // (2 * wanted) for part in range(wanted)]


@dataclass(frozen=True)
class Asked:
    """What one scorer is given for a batch of B, and how its answers become B again."""

    images: np.ndarray
    prompts: Sequence[str]
    metadata: Sequence[Metadata]
    each: int = 1  # frames of a clip

    def means(self, answers: np.ndarray) -> np.ndarray:
        """float32 [B x each] -> [B]; NaN where any of a clip's frames is."""
        return answers if self.each == 1 else answers.reshape(-1, self.each).mean(1)


def as_images(asked: Asked, wanted: int | None) -> Asked:
    """The frames of clips [B, F, 3, H, W] that are scored, [B x n, 3, H, W]; images as they are."""
    clips = asked.images
    if clips.ndim == 4:
        return asked
    chosen = scored_frames(clips.shape[1], wanted)
    images = clips[:, chosen].reshape(-1, *clips.shape[2:])
    images.flags.writeable = False  # as the batch is
    each = len(chosen)
    prompts = [prompt for prompt in asked.prompts for _ in chosen]
    return Asked(images, prompts, [row for row in asked.metadata for _ in chosen], each)


def as_clips(asked: Asked) -> Asked:
    """Clips as they are; an image is a clip of one frame."""
    images = asked.images
    return asked if images.ndim == 5 else Asked(images[:, None], asked.prompts, asked.metadata)
