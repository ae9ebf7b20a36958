"""Relative distance of two arrays. Does not import torch, as the driver uses it too."""

from __future__ import annotations

import math

import numpy as np


def relative_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return |a - b| / |b| over all elements: 0 for equal bits.

    Infinity if shapes differ, or if the result is not finite.
    """
    if a.shape != b.shape:
        return math.inf
    if a.tobytes() == b.tobytes():
        return 0.0
    gap = np.linalg.norm((a - b).astype(np.float64).ravel())
    size = np.linalg.norm(b.astype(np.float64).ravel())
    distance = float(gap / size) if size else math.inf
    return distance if math.isfinite(distance) else math.inf
