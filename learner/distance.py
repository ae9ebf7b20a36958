"""How far two arrays are apart. Imports no torch: the driver compares too."""

from __future__ import annotations

import math

import numpy as np


def relative_distance(a: np.ndarray, b: np.ndarray) -> float:
    """|a - b| / |b| over all elements; 0 for equal bits, infinite where one is not finite."""
    if a.shape != b.shape:
        return math.inf
    if a.tobytes() == b.tobytes():
        return 0.0
    gap = np.linalg.norm((a - b).astype(np.float64).ravel())
    size = np.linalg.norm(b.astype(np.float64).ravel())
    found = float(gap / size) if size else math.inf
    return found if math.isfinite(found) else math.inf
