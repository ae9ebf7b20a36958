"""Notice that the Ray of this machine has ended, which ends the process that uses it.

Ray's library ends a process whose raylet or GCS is gone: at once or a minute later, with exit code
1 and at most with a line of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

NEEDED = ("raylet", "gcs_server")
"""Programs of Ray without which nothing can continue."""


@contextlib.contextmanager
def watched(
    processes: Sequence[subprocess.Popen[bytes]], ended: Callable[[str], None]
) -> Generator[None]:
    """Call ``ended`` with a reason if one of Ray's processes ends within the context.

    The call is made by another thread, once. Only children of this process that are running now are
    watched.
    """
    over = threading.Lock()

    def watch(process: subprocess.Popen[bytes]) -> None:
        how = _wait(process)
        if over.acquire(blocking=False):
            ended(f"Ray's {name_of(process)} on this machine ended ({how})")

    for process in processes:
        if name_of(process) in NEEDED and process.poll() is None:
            threading.Thread(target=watch, args=(process,), daemon=True).start()
    try:
        yield
    finally:
        over.acquire(blocking=False)


def name_of(process: subprocess.Popen[bytes]) -> str:
    """Return the name of a process's program."""
    arguments = process.args
    return Path(os.fsdecode(arguments[0])).name if isinstance(arguments, list) else ""


def _wait(process: subprocess.Popen[bytes]) -> str:
    """Wait until a process has ended; return how. Its exit code is left for others to read."""
    try:
        result = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return "unknown"
    if result is None or result.si_code == os.CLD_EXITED:
        return f"code {result.si_status if result else 0}"
    if result.si_status == signal.SIGBUS:
        return "SIGBUS: /dev/shm, where it keeps objects, may be full"
    return signal.Signals(result.si_status).name
