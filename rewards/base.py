"""What a scorer is, and what is accepted from one. A reward that failed is missing, never zero."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np


class ScorerError(RuntimeError):
    """A scorer raised, or returned something that cannot be a reward. Says which scorer and what."""


class ScorerSetupError(ValueError):
    """A scorer that cannot be made: unknown name, missing module, wrong settings. The message says
    what to do.
    """


@runtime_checkable
class Scorer(Protocol):
    """Pictures in, one number per picture out; higher is better.

    A scorer may also have an attribute ``parts``: dict[str, float32 [B]], the parts of its last
    call, which are logged. A built-in one may have a static method ``check``: all settings by name
    -> nothing; it raises ScorerSetupError for those that can be seen to be wrong without a model.
    """

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> np.ndarray:
        """images uint8 [B, 3, H, W], B prompts, B dicts of prompt metadata -> float32 [B]."""
        ...


def check(scores: Any, count: int) -> tuple[np.ndarray, str | None]:
    """What a scorer returned, as float32 [count] with NaN where there is no usable score, and what
    was wrong (None: nothing).

    A wrong shape or a non-number spoils the whole batch, because nobody can say which number
    belongs to which picture; a NaN or an infinity spoils its own picture only.
    """
    missing = np.full(count, np.nan, np.float32)
    try:
        with np.errstate(over="ignore"):  # beyond float32 becomes infinite, which is reported below
            values = np.asarray(scores, dtype=np.float32).copy()
    except (TypeError, ValueError):
        return (
            missing,
            (
                f"returned {type(scores).__name__}, which is no array of numbers: return float32"
                f" [{count}]"
            ),
        )
    if values.shape != (count,):
        return (
            missing,
            f"returned shape {list(values.shape)} for {count} pictures: return float32 [{count}]",
        )
    bad = np.flatnonzero(~np.isfinite(values))
    if not len(bad):
        return values, None
    problem = (
        f"returned {values[bad[0]]} for picture {bad[0]} of {count} ({len(bad)} not finite): a"
        " score must be a finite number"
    )
    values[bad] = np.nan
    return values, problem


def require_count(name: str, value: Any, least: int) -> None:
    """Raise ScorerSetupError unless a setting is a whole number from ``least`` up."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ScorerSetupError(f"{name} is {value!r}: use a whole number, {least} or more")


def require_one_of(name: str, value: Any, words: Iterable[str]) -> None:
    """Raise ScorerSetupError unless a setting is one of ``words``."""
    if value not in (words := list(words)):
        raise ScorerSetupError(f"{name} is {value!r}: use one of {', '.join(words)}")


def require_pictures(
    images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
) -> None:
    """Raise ValueError unless images is uint8 [B, 3, H, W] with B prompts and B metadata dicts."""
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(
            f"pictures are {images.dtype} {list(images.shape)}: scorers take uint8 [B, 3, H, W]"
        )
    if not len(images) == len(prompts) == len(metadata):
        raise ValueError(
            f"{len(images)} pictures, {len(prompts)} prompts, {len(metadata)} metadata: need as"
            " many of each"
        )
