"""Stop a run on a signal: after the update in progress and a checkpoint.

A second signal stops it at once, without waiting for either, nor for storage that is away.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import TypeVar

from cluster.runtime.tasks import cancel_all
from records.errors import InputsLost, RunFailed, StateLost, Stopped
from records.storage import give_up

ECHO_S = 1.0
"""Seconds within which further signals count as the first one.

`timeout`, shells and terminals signal both a process and its group.
"""
AGAIN = "a second signal arrived"
Value = TypeVar("Value")


async def unless_stopped(work: Coroutine[None, None, Value]) -> Value:
    """Return the value of ``work``, which runs before anything of the run is started.

    Raises Stopped if a signal comes first.
    """
    stopping = Stopping(asyncio.Lock())
    stopping.listen()
    try:
        return await work
    except asyncio.CancelledError:
        raise Stopped(f"stopped by {stopping.signal} before any actor started") from None


class Stopping:
    """Stops the task that called ``listen`` when a signal arrives."""

    def __init__(self, updating: asyncio.Lock):
        """Create the listener; ``updating`` is locked while the work must not be interrupted."""
        self.signal: str | None = None
        self._updating = updating
        self._first_signal_at = 0.0
        self._second_signal = asyncio.Event()
        self._canceller: asyncio.Task[None] | None = None
        self._over = False

    def listen(self) -> None:
        """Cancel the running task when a signal comes, as soon as no update is in progress."""
        work = asyncio.current_task()
        assert work is not None
        install_stop_signals(
            asyncio.get_running_loop(), lambda name: self.handle_signal(name, work)
        )

    def handle_signal(self, name: str, work: asyncio.Task[Value]) -> None:
        """Handle signal ``name`` by cancelling ``work``."""
        if self._over:
            return
        if self._canceller is None:
            self.signal, self._first_signal_at = name, time.monotonic()
            self._canceller = asyncio.create_task(self._cancel(work))
        elif time.monotonic() - self._first_signal_at > ECHO_S:
            self.signal = name
            self._second_signal.set()
            if not self._canceller.done():
                # the canceller waits for the update in progress; a second signal skips that
                self._canceller.cancel()
                work.cancel()

    async def _cancel(self, work: asyncio.Task[Value]) -> None:
        # not during an update: the weights would belong to no iteration and could not be saved
        async with self._updating:
            work.cancel()

    async def save(self, save: Coroutine[None, None, None], limit_s: float) -> str | None:
        """Run ``save``; return None, or the reason why there is no checkpoint.

        It failed, took longer than ``limit_s`` seconds, or a second signal arrived.
        """
        if self._second_signal.is_set():  # maybe in the middle of an update: do not start to save
            save.close()  # Python warns of a coroutine that is never run
            return AGAIN
        saving, second = asyncio.create_task(save), asyncio.create_task(self._second_signal.wait())
        await asyncio.wait({saving, second}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        await cancel_all([saving, second])
        if saving.cancelled():
            return (
                AGAIN
                if self._second_signal.is_set()
                else f"the learner did not write it within {limit_s:g} s"
            )
        error = saving.exception()
        if isinstance(error, RunFailed | StateLost | InputsLost):
            return str(error)
        if error is not None:
            raise error
        return None

    def over(self) -> None:
        """Ignore signals from now on: the run is ending already."""
        self._over = True
        if self._canceller is not None:
            self._canceller.cancel()


def install_stop_signals(loop: asyncio.AbstractEventLoop, stop: Callable[[str], None]) -> None:
    """Call ``stop`` with the signal's name on SIGTERM and SIGINT.

    The loop calls it, and so not while the main thread waits for storage; a second signal ends
    that waiting. Call this after ray.init, which installs handlers of its own.
    """
    # asyncio accepts signal handlers in the main thread only
    if threading.current_thread() is not threading.main_thread():
        return
    first_at: float | None = None

    def end_waiting(number: int, frame: FrameType | None) -> None:
        nonlocal first_at
        if first_at is None:
            first_at = time.monotonic()
        elif time.monotonic() - first_at > ECHO_S:
            give_up(signal.Signals(number).name)

    give_up(None)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number.name)
        # in the place of asyncio's own handler, which does nothing: Python wakes the loop itself
        signal.signal(number, end_waiting)
        signal.siginterrupt(number, False)
