"""Fewer garbage collections while a driver runs.

A driver that imports torch and waits for thousands of calls has a million objects, all of which
the collector visits again and again: at 256 rollout actors that was a third of its time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (50_000, 20, 100)
"""For ``gc.set_threshold``, whose defaults are 700, 10 and 10."""


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Objects that exist already, such as modules, are not visited; new ones are, more rarely."""
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    if not frozen:  # what another has frozen stays frozen
        gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:
            gc.unfreeze()
