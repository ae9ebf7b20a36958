"""One timer for everything that waits for the answers of one actor.

A deadline is far away and nearly every answer comes before it: a timer for each call would be set
and cancelled for nothing, thousands of times in an iteration.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TypeVar

from cluster.runtime import clock

Waiter = asyncio.Future[None]
X = TypeVar("X")


class Alarm:
    """Wakes a waiter when its answer is there, when it is due, or when ``wake`` is called."""

    def __init__(self) -> None:
        self._due: dict[Waiter, float] = {}
        self._timer: asyncio.TimerHandle | None = None  # of the earliest moment, or an earlier one

    async def wait(self, due: float, answer: asyncio.Future[X]) -> None:
        """Returns when ``answer`` is done, at ``due`` on the driver's clock, or on ``wake``."""
        waiter = asyncio.get_running_loop().create_future()
        woken = partial(_wake, waiter)
        answer.add_done_callback(woken)
        self._due[waiter] = due
        # a timer that fires too early only looks, and is set anew: cheaper than to be exact
        if self._timer is None or due < self._timer.when():
            self._set(due)
        try:
            await waiter
        finally:
            del self._due[waiter]
            answer.remove_done_callback(woken)

    def wake(self) -> None:
        """Wake all waiters."""
        for waiter in self._due:
            _wake(waiter)

    def _set(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due, self._fire)

    def _fire(self) -> None:
        self._timer, now = None, clock.now()
        for waiter, due in self._due.items():
            if due <= now:
                _wake(waiter)
        later = [due for waiter, due in self._due.items() if not waiter.done()]
        if later:
            self._set(min(later))


def _wake(waiter: Waiter, *_: object) -> None:
    if not waiter.done():
        waiter.set_result(None)
