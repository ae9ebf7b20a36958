"""Reads and writes that are repeated while the run's storage does not answer.

Storage of a cluster may be away for minutes, for example while its server restarts or its mount is
replaced. A run that ended because of that would have to start all actors again.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
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
LOOK_S = 0.2
"""Seconds between two looks at whether to give up."""
_expected: set[Path] = set()
_given_up: str | None = None


def expect(file: Path) -> None:
    """Count the directory of ``file`` as away while ``file`` is missing, in this process.

    Without its mount the path of a run directory leads to the disk below, where files must not be
    written: nobody would find them, and they can prevent the mount.
    """
    _expected.add(file.absolute())


def give_up(signal: str | None) -> None:
    """End all waiting for storage in this process because of ``signal``; None to wait again.

    Only assigns, so that a handler of signals can call it at any time.
    """
    global _given_up
    _given_up = signal


def given_up() -> str | None:
    """Return the signal that ended all waiting for storage, or None."""
    return _given_up


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
    ``RETRY_S`` seconds, or once ``give_up`` was called, it raises what it last raised.
    """

    @functools.wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> T:
        began, pause, why = time.monotonic(), PAUSE_S, ""
        while True:
            try:
                result = function(*args, **named)
                break
            except OSError as error:
                away_s, reason = time.monotonic() - began, _why_away(error, args)
                if not reason or away_s > RETRY_S or _given_up:
                    raise
                if not why:
                    why = reason
                    log.warning(f"{why}; trying again for {RETRY_S:g} s")
            _sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        if why:
            _tell(time.monotonic() - began, why)
        return result

    return call


def _sleep(seconds: float) -> None:
    # in slices: time.sleep goes on after a signal was handled
    slices = math.ceil(seconds / LOOK_S)
    for _ in range(slices):
        if not _given_up:
            time.sleep(seconds / slices)


def _why_away(error: OSError, args: Iterable[object]) -> str:
    """Return why the storage of the error's file is away; "" if the error has another cause."""
    path = error.filename or next((each for each in args if isinstance(each, Path)), None)
    if error.errno in AWAY:
        return f"{path or 'storage'}: {error.strerror}"
    if isinstance(error, FileNotFoundError) and path is not None:
        file = Path(os.path.abspath(path))
        for expected in _expected:
            if file.is_relative_to(expected.parent) and not os.path.exists(expected):
                return f"{expected.parent} is gone, or its storage is not mounted"
    return ""


@retried
def exists(path: Path) -> bool:
    """Return True if ``path`` exists; unlike Path.exists, wait while its storage is away."""
    try:
        os.stat(path)
    except NotADirectoryError:
        return False
    except FileNotFoundError as error:
        if _why_away(error, (path,)):
            raise
        return False
    return True


read_bytes = retried(Path.read_bytes)


def _tell(seconds: float, why: str) -> None:
    log.warning(f"storage answers again after {seconds:.0f} s")
    for listener in _listeners:
        listener(seconds=round(seconds, 1), why=why)
