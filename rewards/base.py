"""The interface of scorers, and the checks of their results. A failed reward is NaN, never zero."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

Metadata = dict[str, Any]
"""Metadata of a prompt: the fields of its line except the text. If the prompt edits an image,
``image`` is that image, uint8 [3, H, W].
"""
Settings = Mapping[str, Any]
"""Settings of a built-in scorer by name, including defaults."""


class ScorerError(RuntimeError):
    """A scorer raised, or returned something that is no reward; the message names it."""


class ScorerUnreachable(ScorerError):
    """The server that a scorer asks cannot be reached now.

    A run waits for it, up to ``rewards.outage_s``, instead of counting failed images.
    """


class ScorerSetupError(ValueError):
    """A scorer cannot be created: unknown, not importable, or wrong settings."""


@runtime_checkable
class Scorer(Protocol):
    """A function from images and prompts to one number per image; higher is better.

    A scorer may have an attribute ``parts``, dict[str, float32 [B]]: components of the scores of
    its last call, which are logged. If it has a true attribute ``clips``, it receives clips, uint8
    [B, F, 3, H, W]; otherwise it receives ``rewards.frames`` frames of each clip as images.
    """

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        """Score images uint8 [B, 3, H, W] with B prompts and B dicts of metadata: float32 [B]."""
        ...


def source_of(metadata: Metadata) -> np.ndarray | None:
    """Return the image that a prompt edits, uint8 [3, H, W], or None."""
    image = metadata.get("image")
    return image if isinstance(image, np.ndarray) else None


class Effort(NamedTuple):
    """Cost of scoring one image on a GPU."""

    flops: float = 0.0
    dtype: str = "fp32"  # precision of the matrix products
    bytes: float = 0.0  # bytes of weights that are read besides those of the products


class BuiltIn:
    """Base class of built-in scorers: facts that are needed before a scorer is created.

    * ``paths``: settings that are paths of weights, with the file names that are searched there.
    * ``compares``: True if it must receive all images of a prompt together, None if it may.
    """

    paths: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    compares: ClassVar[bool | None] = False

    @staticmethod
    def check(settings: Settings) -> None:
        """Raise ScorerSetupError for settings that are wrong, as far as known without a model."""

    @classmethod
    def model_bytes(cls, settings: Settings) -> int | None:
        """Return the bytes of the model's weights; None if unknown before it is loaded.

        The default is 0, for scorers without a model.
        """
        return 0

    @classmethod
    def effort(cls, settings: Settings, height: int, width: int) -> Effort:
        """Return the cost of scoring an image of this size, for plans; by default nothing.

        Raises ScorerSetupError for settings that ``check`` rejects.
        """
        return Effort()


def check(scores: object, count: int) -> tuple[np.ndarray, str | None]:
    """Check a scorer's result; return (float32 [count], NaN for unusable scores; problem or None).

    After a wrong shape, or a value that is no number, the whole batch is unusable, because numbers
    cannot be assigned to images. NaN or infinity affects only its own image.
    """
    missing = np.full(count, np.nan, np.float32)
    requested = f"return float32 [{count}]"
    try:
        with np.errstate(over="ignore"):  # overflow gives infinity, which is reported below
            values = np.asarray(scores, dtype=np.float32).copy()
    except (TypeError, ValueError, OverflowError):
        return missing, (
            f"returned {type(scores).__name__}, which is not an array of numbers: {requested}"
        )
    if values.shape != (count,):
        return missing, f"returned shape {list(values.shape)} for {count} images: {requested}"
    bad = np.flatnonzero(~np.isfinite(values))
    if not len(bad):
        return values, None
    problem = (
        f"returned {values[bad[0]]} for image {bad[0]} of {count} ({len(bad)} not finite): a"
        " score must be a finite number"
    )
    values[bad] = np.nan
    return values, problem


def require_count(name: str, value: object, least: int) -> None:
    """Raise ScorerSetupError unless a setting is a whole number from ``least`` up."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ScorerSetupError(f"{name} is {value!r}: use a whole number, {least} or more")


def require_share(name: str, value: object) -> None:
    """Raise ScorerSetupError unless a setting is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ScorerSetupError(f"{name} is {value!r}: use a number from 0 to 1")


def require_one_of(name: str, value: object, words: Iterable[str]) -> None:
    """Raise ScorerSetupError unless a setting is one of ``words``."""
    if value not in (words := list(words)):
        raise ScorerSetupError(f"{name} is {value!r}: use one of {', '.join(words)}")


def require_images(
    images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata], clips: bool = False
) -> None:
    """Raise ValueError unless images is uint8 [B, 3, H, W] with B prompts and B metadata dicts.

    With ``clips`` also [B, F, 3, H, W] is allowed.
    """
    requested = (4, 5) if clips else (4,)
    if images.dtype != np.uint8 or images.ndim not in requested or images.shape[-3] != 3:
        raise ValueError(
            f"images are {images.dtype} {list(images.shape)}: scorers take uint8 [B, 3, H, W]"
            + (" or [B, F, 3, H, W]" if clips else "")
        )
    if not len(images) == len(prompts) == len(metadata):
        raise ValueError(
            f"{len(images)} images, {len(prompts)} prompts, {len(metadata)} metadata: the numbers"
            " must be equal"
        )
