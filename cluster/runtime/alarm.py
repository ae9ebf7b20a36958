"""One timer for the deadlines of all unanswered calls to an actor.

Nearly every answer comes long before its deadline: a timer for each call would be set and cancelled
for nothing, thousands of times per iteration.
"""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

from cluster.runtime import clock


class Watched(Protocol):
    """Something with a deadline that can be checked."""

    def look(self, due: float) -> float:
        """Check the deadline; return the time of the next check, on the driver's clock.

        ``due`` is the time for which this check was scheduled.
        """
        ...


class Alarm:
    """Timer that checks watched objects when they are due, or when it is woken."""

    def __init__(self) -> None:
        self._due: dict[Watched, float] = {}
        self._timer: asyncio.TimerHandle | None = None  # fires at or before the earliest due time

    def watch(self, one: Watched, due: float) -> None:
        """Check ``one`` at ``due`` and then at the times it returns, until it is forgotten."""
        self._due[one] = due
        self._ring_by(due)

    def forget(self, one: Watched) -> None:
        """Stop watching ``one``."""
        del self._due[one]

    def wake(self) -> None:
        """Check all watched objects now."""
        self._look(math.inf)

    def _look(self, until: float) -> None:
        for one, due in self._due.items():
            if due <= until:
                self._due[one] = one.look(due)
        self._ring_by(min(self._due.values(), default=math.inf))

    def _ring_by(self, due: float) -> None:
        # a timer that fires too early only checks and is set again: cheaper than an exact one
        if due >= (self._timer.when() if self._timer else math.inf):
            return
        if self._timer:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due, self._rings)

    def _rings(self) -> None:
        self._timer = None
        self._look(clock.now())
