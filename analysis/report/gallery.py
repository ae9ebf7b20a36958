"""Report section with images of held-out prompts before and after training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.report.charts import number
from analysis.report.data import RunData
from records.images import MAX_TINY_SIDE, StepImages, data_uri


@dataclass(frozen=True)
class InlineImage:
    """Image as a ``data:`` URL; without an address, its place is left blank."""

    text: str
    address: str = ""
    width: int = 0
    height: int = 0

    @property
    def tiny(self) -> bool:
        """True if the image is small enough to be enlarged without smoothing."""
        return max(self.width, self.height) <= MAX_TINY_SIDE


@dataclass(frozen=True)
class Half:
    """Images of one prompt at one step, and their mean reward, which is "" if unknown."""

    title: str
    mean: str
    images: list[InlineImage]

    @property
    def columns(self) -> int:
        """Number of images side by side."""
        return 1 if len(self.images) < 2 else 2 if len(self.images) <= 4 else 3


@dataclass(frozen=True)
class Prompt:
    """Images of a prompt: the source image of an editing model, then before and after training."""

    text: str
    halves: list[Half]


def gallery(run: RunData) -> list[Prompt]:
    """Return all prompts that have images."""
    if not run.images.steps:
        return []
    first, last = run.images.steps[0], run.images.steps[-1]
    steps = [("before", first)] + ([(f"after {last.step}", last)] if last is not first else [])
    return [
        Prompt(
            text,
            _source(run, index, text)
            + [_half(run, title, step, index, text) for title, step in steps],
        )
        for index, text in run.images.prompts.items()
    ]


def _source(run: RunData, index: int, prompt: str) -> list[Half]:
    path = run.images.sources.get(index)
    return [Half("source", "", [shown_image(path, f"source: {prompt}")])] if path else []


def _half(run: RunData, title: str, step: StepImages, index: int, prompt: str) -> Half:
    scores = run.held_out.get(step.step, [])
    row: Sequence[float] = scores[index] if 0 <= index < len(scores) else ()
    seeds = run.images.seeds(index)
    rewards = [*row[: len(seeds)], *[math.nan] * (len(seeds) - len(row))]
    images = []
    for noise, reward in zip(seeds, rewards, strict=True):
        scored = f", reward {number(reward)}" if math.isfinite(reward) else ""
        images.append(_image(step, index, noise, f"{title}: {prompt}, noise {noise}{scored}"))
    known = [reward for reward in rewards if math.isfinite(reward)]
    return Half(title, number(math.fsum(known) / len(known)) if known else "", images)


def _image(step: StepImages, index: int, noise: int, text: str) -> InlineImage:
    path = step.files.get((index, noise))
    return InlineImage(text) if path is None else shown_image(path, text)


def shown_image(path: Path, text: str) -> InlineImage:
    """Return the image or clip in a file, without an address if it cannot be read."""
    try:
        return InlineImage(text, *data_uri(path))
    except OSError:  # the file was just replaced or is not an image
        return InlineImage(text)
