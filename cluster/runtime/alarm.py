"""One timer for all calls that an actor has not answered.

A deadline is far away and nearly every answer comes before it: a timer for each call would be set
and cancelled for nothing, thousands of times in an iteration.
"""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

from cluster.runtime import clock


class Watched(Protocol):
    """What waits."""

    def look(self, due: float) -> float:
        """When to look next, on the driver's clock; ``due``: when this look should have been."""
        ...


class Alarm:
    """Has what waits looked at when it is due, or when it is told to."""

    def __init__(self) -> None:
        self._due: dict[Watched, float] = {}
        self._timer: asyncio.TimerHandle | None = None  # of the earliest moment, or an earlier one

    def watch(self, one: Watched, due: float) -> None:
        """Look at ``one`` at ``due``, and then whenever it says, until it is forgotten."""
        self._due[one] = due
        self._ring_by(due)

    def forget(self, one: Watched) -> None:
        """It waits no more."""
        del self._due[one]

    def wake(self) -> None:
        """Look at all, whenever they are due."""
        self._look(math.inf)

    def _look(self, until: float) -> None:
        for one, due in self._due.items():
            if due <= until:
                self._due[one] = one.look(due)
        self._ring_by(min(self._due.values(), default=math.inf))

    def _ring_by(self, due: float) -> None:
        # one that rings too early only looks, and is set anew: cheaper than to be exact
        if due >= (self._timer.when() if self._timer else math.inf):
            return
        if self._timer:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due, self._rings)

    def _rings(self) -> None:
        self._timer = None
        self._look(clock.now())
