"""Python looks for cycles more rarely while a driver runs.

It looks at all objects again and again as their number grows, and a driver that imports torch and
waits for thousands of calls has a million: at 256 rollout actors that was a third of its time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (50_000, 20, 100)
"""New objects before the youngest are looked at, and of such looks before the older ones are."""


@contextmanager
def collected_rarely() -> Iterator[None]:
    """What is there already, such as modules, is not looked at; what comes is, every so often."""
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    if not frozen:  # else that is somebody else's, who wants it to stay so
        gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:
            gc.unfreeze()
