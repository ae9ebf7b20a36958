"""The arithmetic of a comparison: means with standard errors, paired differences, speed-ups."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Parts of the baseline's final gain; the tables tell when each was reached."""
Points = Sequence[tuple[float, float]]
"""(x, gain) at the evaluations of a run or of a mean curve, x ascending."""


@dataclass(frozen=True)
class Mean:
    """A mean over run seeds and its standard error, NaN for fewer than two."""

    mean: float
    error: float
    count: int


@dataclass(frozen=True)
class Moment:
    """A point of a curve: after ``iteration`` updates and ``seconds`` of training."""

    iteration: int
    seconds: Mean
    score: Mean
    gain: Mean


NOTHING = Mean(math.nan, math.nan, 0)


def mean_of(values: Sequence[float]) -> Mean:
    """Mean and standard error s / sqrt(n), s with n - 1; NaN where there are too few values."""
    if not values:
        return NOTHING
    if not all(map(math.isfinite, values)):  # statistics.stdev would raise
        return Mean(math.nan, math.nan, len(values))
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Mean(statistics.fmean(values), error, len(values))


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Mean:
    """Mean difference over the run seeds of both, so that a seed's effect on both cancels."""
    return mean_of(
        [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]
    )


def speed_up(seconds: Mean, baseline: Mean) -> float:
    """How many times faster than the baseline; NaN where one is unknown or zero."""
    return baseline.mean / seconds.mean if seconds.mean > 0 and baseline.mean > 0 else math.nan


def time_to(curve: Sequence[Moment], gain: float) -> float | None:
    """Seconds of training until the mean gain is ``gain``; None as ``first_at``."""
    return first_at([(moment.seconds.mean, moment.gain.mean) for moment in curve], gain)


def first_at(points: Points, gain: float) -> float | None:
    """The first x with this ``gain``, on straight lines between evaluations.

    None: never, the curve has no evaluation between its ends (a line through two points would be
    made up), or ``gain`` is not positive.
    """
    if len(points) < 3 or not gain > 0:
        return None
    for (start, low), (end, high) in itertools.pairwise(points):
        # reached but for rounding is reached
        if high >= gain * (1 - 1e-12):
            part = min(1.0, (gain - low) / (high - low)) if high > low else 1.0
            return start + max(0.0, part) * (end - start)
    return None


def at(points: Points, x: float) -> float | None:
    """The gain at ``x`` on straight lines between evaluations; None beyond the last one."""
    for (start, low), (end, high) in itertools.pairwise(points):
        if start <= x <= end * (1 + 1e-12):
            return low + (high - low) * min(1.0, (x - start) / (end - start))
    return None
