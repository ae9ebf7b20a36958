"""How those that share a GPU, or the cores of a machine, slow each other."""

from __future__ import annotations


def speed(wanted: float, capacity: float, together: float) -> float:
    """The speed of each user compared with being alone, where all together want ``wanted`` of a
    ``capacity``: 1 for a GPU, or so many cores. ``together``: the speed of a core while all cores
    are busy.
    """
    if wanted <= 1.0:
        return 1.0
    slower = 1.0
    if capacity > 1.0:
        slower -= (1.0 - together) * (min(wanted, capacity) - 1.0) / (capacity - 1.0)
    return slower * min(1.0, capacity / wanted)
