"""Reads and writes that are repeated while the run's storage does not answer.

Storage of a cluster may be away for minutes, for example while its server restarts. A run that
ended because of that would have to start all actors again.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)

AWAY = frozenset(
    {
        errno.EIO,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.ESTALE,
        errno.EREMOTEIO,
        errno.ETIMEDOUT,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
    }
)
"""Errors of a file system whose server does not answer; others, as of a full disk, stay."""
RETRY_S = 600.0
"""Seconds for which a call is repeated."""
PAUSE_S = 1.0
LONGEST_PAUSE_S = 15.0


class Listener(Protocol):
    """Function that is told for how many seconds storage was away, and the first error."""

    def __call__(self, *, seconds: float, why: str) -> None: ...


_listeners: list[Listener] = []


@contextlib.contextmanager
def outages_told(listener: Listener) -> Iterator[None]:
    """Call ``listener`` after each outage that this process notices within the context."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def retried(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that can be repeated: do so while storage is away.

    The function blocks, like any access to a file system that waits for its server. After
    ``RETRY_S`` seconds it raises what it last raised.
    """

    @functools.wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> T:
        began, pause, why = time.monotonic(), PAUSE_S, ""
        while True:
            try:
                result = function(*args, **named)
                break
            except OSError as error:
                away_s = time.monotonic() - began
                if error.errno not in AWAY or away_s > RETRY_S:
                    raise
                if not why:
                    file = error.filename or next(filter(_is_path, args), "storage")
                    why = f"{file}: {error.strerror}"
                    log.warning(f"{why}; trying again for {RETRY_S:g} s")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        if why:
            _tell(time.monotonic() - began, why)
        return result

    return call


def _is_path(argument: object) -> bool:
    return isinstance(argument, Path)


def _tell(seconds: float, why: str) -> None:
    log.warning(f"storage answers again after {seconds:.0f} s")
    for listener in _listeners:
        listener(seconds=round(seconds, 1), why=why)
