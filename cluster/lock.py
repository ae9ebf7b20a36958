"""One driver per run directory: two would cut each other's metrics and write each other's checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from configs.load import ConfigError

LONGEST = 300
"""Bytes that say who holds a lock."""


@contextlib.contextmanager
def held(file: Path) -> Iterator[str | None]:
    """Hold ``file``, whose content names the holder, for this process; yields None, or why this file system locks nothing.

    The lock is the kernel's and ends with the process, however that ends; the file stays and says nothing by being there. It is
    opened for writing because Linux makes of flock on NFS a lock of bytes, which wants that.

    Raises:
        ConfigError: another process holds it.
        OSError: the file cannot be made.
    """
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield _unlocked(lock, file.parent)
    finally:
        os.close(lock)


def _unlocked(lock: int, directory: Path) -> str | None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = os.read(lock, LONGEST).decode(errors="replace").strip() or "another process"
        raise ConfigError(
            [
                f"{directory}: a run is at work here: {who}: stop it, or wait until it ends, and continue it with --resume; "
                "--set name=... starts another"
            ]
        ) from None
    except OSError as error:
        return error.strerror or str(error)
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    with contextlib.suppress(OSError):  # a full disk: who holds it is then not known, but it is held
        os.ftruncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode()[:LONGEST])
    return None
