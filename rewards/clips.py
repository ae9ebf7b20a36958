"""Clips for image scorers: frames of each clip are scored, and their mean is the clip's score.

A scorer with a true attribute ``clips`` receives the clips, uint8 [B, F, 3, H, W], themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rewards.base import Metadata


def scored_frames(frames: int, count: int | None) -> list[int]:
    """Return the indices of the frames to score: the middles of ``count`` equal parts of a clip.

    All frames if there are no more than that, or if ``count`` is None.
    """
    if count is None or count >= frames:
        return list(range(frames))
    return [(2 * part + 1) * frames // (2 * count) for part in range(count)]


@dataclass(frozen=True)
class ScorerInput:
    """The inputs of one scorer for a batch of B, and the reduction of its results to B."""

    images: np.ndarray
    prompts: Sequence[str]
    metadata: Sequence[Metadata]
    frames_per_clip: int = 1  # frames of a clip

    def reduce(self, answers: np.ndarray) -> np.ndarray:
        """Average float32 [B x each] to [B]; NaN if any frame of a clip is NaN."""
        return (
            answers
            if self.frames_per_clip == 1
            else answers.reshape(-1, self.frames_per_clip).mean(1)
        )


def as_images(batch: ScorerInput, count: int | None) -> ScorerInput:
    """Turn clips [B, F, 3, H, W] into ``count`` frames to score, [B x n, 3, H, W]; keep images."""
    clips = batch.images
    if clips.ndim == 4:
        return batch
    chosen = scored_frames(clips.shape[1], count)
    images = clips[:, chosen].reshape(-1, *clips.shape[2:])
    images.flags.writeable = False  # like the batch
    each = len(chosen)
    prompts = [prompt for prompt in batch.prompts for _ in chosen]
    return ScorerInput(images, prompts, [row for row in batch.metadata for _ in chosen], each)


def as_clips(batch: ScorerInput) -> ScorerInput:
    """Keep clips; turn images into clips of one frame."""
    if batch.images.ndim == 5:
        return batch
    return ScorerInput(batch.images[:, None], batch.prompts, batch.metadata)
