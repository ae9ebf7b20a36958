"""One driver per run directory: two would cut each other's metrics and checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from configs.load import ConfigError

LONGEST = 300
"""Bytes that say who holds a lock."""
AGAIN_S = 0.1


class Lock(NamedTuple):
    """A lock's open descriptor, which may be passed on, and why the file system locks nothing."""

    file: int
    missing: str | None


@contextlib.contextmanager
def held(file: Path, what: str, remedy: str) -> Iterator[Lock]:
    """Hold a lock on ``file`` for ``what``; the file names the holder, and another process is
    refused with the advice ``remedy``.

    The lock is the kernel's and ends with the process, however that ends; the file stays, and its
    existence means nothing. It is opened for writing because on NFS Linux turns flock into a lock
    of bytes, which requires that.

    Raises:
        ConfigError: another process holds it.
        OSError: the file cannot be made.
    """
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield Lock(lock, _missing(lock, file.parent, what, remedy))
    finally:
        os.close(lock)


def busy(file: Path) -> bool:
    """Whether a process holds ``file``; False also where nobody can know."""
    try:
        lock = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


def _take(lock: int) -> None:
    """Raises BlockingIOError where another process holds it. ``busy`` does for an instant, hence
    the second try.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(AGAIN_S)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _missing(lock: int, directory: Path, what: str, remedy: str) -> str | None:
    try:
        _take(lock)
    except BlockingIOError:
        who = os.read(lock, LONGEST).decode(errors="replace").strip() or "another process"
        raise ConfigError(f"{directory}: {what} is at work here: {who}: {remedy}") from None
    except OSError as error:
        return error.strerror or str(error)
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    # on a full disk the lock is held all the same, but does not say by whom
    with contextlib.suppress(OSError):
        os.ftruncate(lock, 0)
        os.write(
            lock,
            f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode()[:LONGEST],
        )
    return None
