"""The driver's one clock: that of the event loop it runs on, which a simulation makes virtual."""

from __future__ import annotations

import asyncio
import selectors
import time

START = 1_800_000_000.0
"""The wall clock, seconds of the epoch, at the beginning of virtual time."""


def now() -> float:
    """Seconds of the running event loop, or of the monotonic clock that it would have."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


def wall() -> float:
    """Seconds of the epoch, for what is written down."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return time.time()
    return START + loop.time() if isinstance(loop, VirtualLoop) else time.time()


class Stuck(RuntimeError):
    """Everything waits and no timer is set: the loop would wait for ever."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which waiting takes no time: when nothing is ready, its time jumps to the
    next timer. Code that runs takes no time either.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Seconds since the beginning."""
        return self._now

    def jump(self, seconds: float) -> None:
        """Advance the time."""
        self._now += seconds


class _Jumping(selectors.DefaultSelector):
    """Polls; where a selector would have to wait, virtual time jumps instead."""

    def __init__(self, loop: VirtualLoop):
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # asked all the same: other threads wake the loop through a socket of its own
        if ready := super().select(0):
            return ready
        if timeout is None:
            raise Stuck("everything waits and no timer is set")
        self._loop.jump(max(0.0, timeout))
        return []
