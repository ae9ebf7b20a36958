"""What a scorer is, and what is accepted from one. A reward that failed is missing, never zero."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

Metadata = dict[str, Any]
"""What a prompt file says about a prompt beside its text: any JSON object, but under ``image`` the
image that the prompt edits, uint8 [3, H, W], where it edits one.
"""
Settings = Mapping[str, Any]
"""A built-in scorer's settings by name, its defaults among them."""


class ScorerError(RuntimeError):
    """A scorer raised or returned what cannot be a reward. Says which scorer, and what."""


class ScorerSetupError(ValueError):
    """A scorer that cannot be made: unknown, not importable, wrong settings. Says what to do."""


@runtime_checkable
class Scorer(Protocol):
    """Images in, one number per image out; higher is better.

    A scorer may also have an attribute ``parts``: dict[str, float32 [B]], the parts of its last
    call, which are logged. With an attribute ``clips`` that is true it is given clips, uint8
    [B, F, 3, H, W], instead of images; without, of clips the frames of ``rewards.frames``.
    """

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        """images uint8 [B, 3, H, W], B prompts, B dicts of prompt metadata -> float32 [B]."""
        ...


def source_of(metadata: Metadata) -> np.ndarray | None:
    """The image that a prompt edits, uint8 [3, H, W]."""
    found = metadata.get("image")
    return found if isinstance(found, np.ndarray) else None


class Effort(NamedTuple):
    """What one image takes of a GPU that scores it."""

    flops: float = 0.0
    dtype: str = "fp32"  # of the products
    bytes: float = 0.0  # that it reads of its weights, beside the products


class BuiltIn:
    """What a built-in scorer states about itself, for those who ask before one is made.

    ``paths``: settings that say where weights are, each with the file names looked for there.
    ``compares``: whether it must be given all images of a prompt at once; None: it may be.
    """

    paths: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    compares: ClassVar[bool | None] = False

    @staticmethod
    def check(settings: Settings) -> None:
        """Raises ScorerSetupError for settings that can be seen to be wrong without a model."""

    @classmethod
    def model_bytes(cls, settings: Settings) -> int | None:
        """Bytes of its model's weights; None where only loading it would tell. Here: no model."""
        return 0

    @classmethod
    def effort(cls, settings: Settings, height: int, width: int) -> Effort:
        """Of an image of this size, for plans. Here nothing: no model, or nothing is known of it.

        Raises ScorerSetupError for values that ``check`` refuses.
        """
        return Effort()


def check(scores: object, count: int) -> tuple[np.ndarray, str | None]:
    """(float32 [count], NaN where no score is usable; what was wrong or None) of an answer.

    A wrong shape or a non-number spoils the whole batch, because nobody can say which number
    belongs to which image; a NaN or an infinity spoils its own image only.
    """
    missing = np.full(count, np.nan, np.float32)
    wanted = f"return float32 [{count}]"
    try:
        with np.errstate(over="ignore"):  # beyond float32 becomes infinite, which is reported below
            values = np.asarray(scores, dtype=np.float32).copy()
    except (TypeError, ValueError, OverflowError):
        return missing, f"returned {type(scores).__name__}, which is no array of numbers: {wanted}"
    if values.shape != (count,):
        return missing, f"returned shape {list(values.shape)} for {count} images: {wanted}"
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

    ``clips``: or [B, F, 3, H, W].
    """
    wanted = (4, 5) if clips else (4,)
    if images.dtype != np.uint8 or images.ndim not in wanted or images.shape[-3] != 3:
        raise ValueError(
            f"images are {images.dtype} {list(images.shape)}: scorers take uint8 [B, 3, H, W]"
            + (" or [B, F, 3, H, W]" if clips else "")
        )
    if not len(images) == len(prompts) == len(metadata):
        raise ValueError(
            f"{len(images)} images, {len(prompts)} prompts, {len(metadata)} metadata: need as"
            " many of each"
        )
