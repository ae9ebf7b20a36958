"""The driver's clock: that of its event loop, which may be a virtual one in a simulation."""

from __future__ import annotations

import asyncio
import selectors
import time

START = 1_800_000_000.0
"""Wall-clock time, in seconds since the epoch, at which virtual time starts."""


def now() -> float:
    """Return the time of the running event loop in seconds, or monotonic time without a loop."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


def wall() -> float:
    """Return wall-clock time in seconds since the epoch, for records."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return time.time()
    return START + loop.time() if isinstance(loop, VirtualLoop) else time.time()


class Stuck(RuntimeError):
    """All tasks wait and no timer is set, so that the loop would wait for ever."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with virtual time: if nothing is ready, its time jumps to the next timer.

    Code that runs takes no virtual time.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Return the virtual seconds since the start."""
        return self._now

    def jump(self, seconds: float) -> None:
        """Advance virtual time."""
        self._now += seconds


class _Jumping(selectors.DefaultSelector):
    """A selector that polls and advances virtual time where another one would wait."""

    def __init__(self, loop: VirtualLoop):
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # poll nevertheless: other threads wake the loop through its socket
        if ready := super().select(0):
            return ready
        if timeout is None:
            raise Stuck("all tasks wait and no timer is set")
        self._loop.jump(max(0.0, timeout))
        return []
