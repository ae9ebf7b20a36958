"""Bins of a long line: a chart draws their means, and shades from their lowest to highest value.

Single points of a long line, evenly picked, would hide most of what happened in between, such as a
gradient norm that is high in one iteration of a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

MAX_POINTS = 300
"""Maximum number of points of a line; more cannot be distinguished at the width of a page."""


@dataclass(frozen=True)
class Bin:
    """Adjacent points of a line from ``first`` to ``last`` (x): mean x and y, range of y.

    Values that are not finite are left out; if there is no other, ``y`` is NaN.
    """

    first: float
    last: float
    x: float
    y: float
    low: float
    high: float

    @property
    def single(self) -> bool:
        """Whether this is one point as it is."""
        return self.first == self.last


def bin_size(count: int, most: int = MAX_POINTS) -> int:
    """Return the number of points in the largest of at most ``most`` bins of ``count`` points."""
    return max(1, math.ceil(count / most))


def bins(points: Sequence[tuple[float, float]], most: int = MAX_POINTS) -> list[Bin]:
    """Return at most ``most`` bins of the points, in order; their sizes differ by at most one."""
    return [_bin(points[part]) for part in _parts(len(points), most)]


def bin_means(values: Sequence[float], most: int = MAX_POINTS) -> list[float]:
    """Return the means in the bins of ``bins``, without values that are not finite."""
    return [_mean(values[part]) for part in _parts(len(values), most)]


def _parts(count: int, most: int) -> list[slice]:
    parts = min(count, most)
    return [slice(k * count // parts, (k + 1) * count // parts) for k in range(parts)]


def _bin(points: Sequence[tuple[float, float]]) -> Bin:
    xs = [x for x, _ in points]
    ys = _finite([y for _, y in points])
    return Bin(xs[0], xs[-1], fmean(xs), fmean(ys), min(ys), max(ys))


def _mean(values: Sequence[float]) -> float:
    return fmean(_finite(values))


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)] or [math.nan]
