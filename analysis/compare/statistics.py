"""The arithmetic of a comparison: means with standard errors, paired differences, speed-ups."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Fractions of the baseline's final gain; the tables show when each of them was reached."""
Points = Sequence[tuple[float, float]]
"""(x, gain) at the evaluations of a run or of a mean curve, x ascending."""


@dataclass(frozen=True)
class Mean:
    """Mean over run seeds and its standard error, which is NaN for fewer than two values."""

    mean: float
    error: float
    count: int


@dataclass(frozen=True)
class CurvePoint:
    """Point of a mean curve: score and gain after ``iteration`` updates.

    ``seconds`` is the training time up to that point.
    """

    iteration: int
    seconds: Mean
    score: Mean
    gain: Mean


NOTHING = Mean(math.nan, math.nan, 0)


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean and its standard error s / sqrt(n), where s has n - 1 degrees of freedom.

    The mean is NaN if there is no value or a value is not finite. The error is NaN in the same
    cases, and for a single value.
    """
    if not values:
        return NOTHING
    if not all(map(math.isfinite, values)):  # statistics.stdev would raise
        return Mean(math.nan, math.nan, len(values))
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Mean(statistics.fmean(values), error, len(values))


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Mean:
    """Return the mean paired difference over the run seeds that both sides have.

    Pairing cancels the effect that a seed has on both.
    """
    return mean_of(
        [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]
    )


def speed_up(seconds: Mean, baseline: Mean) -> float:
    """Return the speed-up over the baseline, or NaN if either time is unknown or zero."""
    return baseline.mean / seconds.mean if seconds.mean > 0 and baseline.mean > 0 else math.nan


def time_to(curve: Sequence[CurvePoint], gain: float) -> float | None:
    """Return the seconds of training until the mean gain is ``gain``, as ``first_crossing``."""
    return first_crossing([(moment.seconds.mean, moment.gain.mean) for moment in curve], gain)


def first_crossing(points: Points, gain: float) -> float | None:
    """Return the first x at which the curve reaches ``gain``, interpolating linearly.

    Returns None if the curve never reaches it, if ``gain`` is not positive, or if there is no
    evaluation between the first and the last one: a line through two points would be invented.
    """
    if len(points) < 3 or not gain > 0:
        return None
    for (start, low), (end, high) in itertools.pairwise(points):
        # tolerate rounding errors
        if high >= gain * (1 - 1e-12):
            fraction = min(1.0, (gain - low) / (high - low)) if high > low else 1.0
            return start + max(0.0, fraction) * (end - start)
    return None


def gain_at(points: Points, x: float) -> float | None:
    """Return the gain at ``x``, interpolated linearly, or None beyond the last evaluation."""
    for (start, low), (end, high) in itertools.pairwise(points):
        if start <= x <= end * (1 + 1e-12):
            return low + (high - low) * min(1.0, (x - start) / (end - start))
    return None
