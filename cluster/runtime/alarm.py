"""One timer for all that wait for an actor's answers.

A deadline is far away and nearly every answer comes before it: a timer for each call would be set
and cancelled for nothing, thousands of times in an iteration.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TypeVar

from cluster.runtime import clock

Bell = asyncio.Future[None]
X = TypeVar("X")


class Alarm:
    """Wakes who waits when an answer is there, at a moment, or when it is told to."""

    def __init__(self) -> None:
        self._due: dict[Bell, float] = {}
        self._timer: asyncio.TimerHandle | None = None  # of the earliest moment, or an earlier one

    async def wait(self, due: float, answer: asyncio.Future[X]) -> None:
        """Returns when ``answer`` is done, at ``due`` on the driver's clock, or on ``wake``."""
        bell = asyncio.get_running_loop().create_future()
        ring = partial(_ring, bell)
        answer.add_done_callback(ring)
        self._due[bell] = due
        # one that rings too early only looks, and is set anew: cheaper than to be exact
        if self._timer is None or due < self._timer.when():
            self._set(due)
        try:
            await bell
        finally:
            del self._due[bell]
            answer.remove_done_callback(ring)

    def wake(self) -> None:
        """Wake all that wait."""
        for bell in self._due:
            _ring(bell)

    def _set(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due, self._rings)

    def _rings(self) -> None:
        self._timer, now = None, clock.now()
        for bell, due in self._due.items():
            if due <= now:
                _ring(bell)
        later = [due for bell, due in self._due.items() if not bell.done()]
        if later:
            self._set(min(later))


def _ring(bell: Bell, *_: object) -> None:
    if not bell.done():
        bell.set_result(None)
