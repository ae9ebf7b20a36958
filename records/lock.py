"""Lock of a run directory: two drivers would damage each other's metrics and checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from configs.load import ConfigError
from records.storage import outages_told

log = logging.getLogger(__name__)
MAX_HOLDER_BYTES = 300
"""Largest number of bytes of the text that names a lock's holder."""
RETRY_S = 0.1
HOLD_S, POLL_S = 300.0, 2.0
"""For how long, and how often, a lock of another machine is waited for. GlusterFS kept that of a
lost machine for 43 s; by default NFS does so for 90 s.
"""


class Lock(NamedTuple):
    """A lock's descriptor, which may be passed on, and why the file system cannot lock, or None."""

    file: int
    unsupported_reason: str | None


@contextlib.contextmanager
def exclusive_lock(
    file: Path, what: str, remedy: str, unlocked: Callable[[str], None] = log.warning
) -> Iterator[Lock]:
    """Lock ``file`` for ``what`` within the context; the file's content names the holder.

    It is a lock of the kernel, which ends with the process in any case. The file remains, but its
    existence has no meaning. It is opened for writing because on NFS Linux implements flock by byte
    locks, which require that. After an outage of its storage it is taken again: a server that has
    not heard of this machine for a while gives its locks to others. If its mount was replaced, the
    file is opened again, with the same descriptor. If another process has taken the lock meanwhile,
    the call that noticed the outage raises ConfigError. If the file system cannot lock any more,
    ``unlocked`` is called with the reason.

    Raises:
        ConfigError: another process has the lock; the message advises ``remedy``.
        OSError: the file cannot be created.
    """
    lock = _open(file)
    try:
        unsupported = _try_lock(lock, file.parent, what, remedy)
        with contextlib.ExitStack() as stack:
            if unsupported is None:
                stack.enter_context(outages_told(partial(_lock_again, lock, file, unlocked)))
            yield Lock(lock, unsupported)
    finally:
        os.close(lock)


def _open(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _lock_again(
    lock: int, file: Path, unlocked: Callable[[str], None], *, seconds: float, why: str
) -> None:
    try:
        _acquire_anew(lock, file)
    except BlockingIOError:
        raise ConfigError(
            f"{file.parent}: its storage was away for {seconds:g} s ({why}), and {_holder(lock)}"
            " has locked it since"
        ) from None
    except OSError as error:
        unlocked(error.strerror or str(error))


def _acquire_anew(lock: int, file: Path) -> None:
    """Take the lock, if necessary after opening ``file`` again as descriptor ``lock``.

    A descriptor of a mount that was replaced, as after CephFS has evicted its client, stays
    unusable.
    """
    try:
        _acquire(lock)
    except BlockingIOError:
        raise  # another process has it, whether or not the file can be opened again
    except OSError:
        opened = _open(file)
        os.dup2(opened, lock, inheritable=False)
        os.close(opened)
        _acquire(lock)


def is_locked(file: Path) -> bool:
    """Return True if a process has locked ``file``; False also if that cannot be determined."""
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


def wait_for_other_host(file: Path, tell: Callable[[str], None]) -> None:
    """Wait up to ``HOLD_S`` seconds while a process on another machine has locked ``file``.

    Storage keeps the lock of a machine that was lost until its server notices. A process on this
    machine that has the lock exists, and is not waited for. ``tell`` is called once, with a line.
    """
    deadline = time.monotonic() + HOLD_S
    told = False
    while is_locked(file) and time.monotonic() < deadline:
        try:
            holder = file.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return  # taking the lock will say why
        if not holder or f" on {socket.gethostname()} since " in holder:
            return
        if not told:
            tell(
                f"{file.parent}: locked by {holder}: waiting for up to {HOLD_S:g} s, as storage"
                " keeps the lock of a lost machine for a while"
            )
        told = True
        time.sleep(POLL_S)


def _acquire(lock: int) -> None:
    """Take the lock. Raises BlockingIOError if another process has it.

    It tries twice, because ``is_locked`` of another process takes the lock for a moment.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(RETRY_S)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _try_lock(lock: int, directory: Path, what: str, remedy: str) -> str | None:
    try:
        _acquire(lock)
    except BlockingIOError:
        raise ConfigError(
            f"{directory}: {what} is active here: {_holder(lock)}: {remedy}"
        ) from None
    except OSError as error:
        return error.strerror or str(error)
    # on a full disk the lock works nevertheless, but does not name its holder
    with contextlib.suppress(OSError):
        os.ftruncate(lock, 0)
        os.write(lock, this_process().encode()[:MAX_HOLDER_BYTES])
        os.fsync(lock)  # an NFS client keeps what is written to an open file for half a minute
    return None


def this_process() -> str:
    """Return the line that names this process where it holds a directory."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"process {os.getpid()} on {socket.gethostname()} since {since}\n"


def _holder(lock: int) -> str:
    text = os.pread(lock, MAX_HOLDER_BYTES, 0).decode(errors="replace").strip()
    return text or "another process"
