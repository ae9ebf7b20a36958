"""Notice that Ray on this machine has ended, which ends the process that uses it.

Ray's library ends a process whose raylet or GCS is gone: at once or a minute later, with exit code
1 and at most with a line of its own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

NEEDED = ("raylet", "gcs_server")
"""Programs of Ray without which nothing can continue."""
PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """A running process. ``descriptor`` refers to it (pidfd_open(2)), even if its id is reused."""

    name: str
    descriptor: int


def processes_of(node: str, proc: Path = PROC) -> list[Process]:
    """Return the processes of ``NEEDED`` that run a node of Ray, by its id, if it is here.

    A GCS that keeps its state in Redis is not among them: it may be started again.
    """
    found = list[Process]()
    for directory in proc.glob("[0-9]*"):
        # a process may end meanwhile; a kernel before 5.3 or a sandbox has no descriptors
        with contextlib.suppress(OSError):
            arguments = (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")
            name = Path(arguments[0]).name
            if name in NEEDED and _is_of(node, arguments):
                found.append(Process(name, os.pidfd_open(int(directory.name))))
    return found


def _is_of(node: str, arguments: Iterable[str]) -> bool:
    """Return True for the arguments of a process of this node that is not started again."""
    options = dict(each.removeprefix("--").split("=", 1) for each in arguments if "=" in each)
    return node in (options.get("node_id"), options.get("node-id")) and not options.get(
        "redis_address"
    )


@contextlib.contextmanager
def watched(processes: Sequence[Process], ended: Callable[[str], None]) -> Generator[None]:
    """Call ``ended`` with a reason if one of the processes ends within the context.

    The call is made by another thread, once. A descriptor is closed when its process has ended.
    """
    over = threading.Lock()

    def watch(process: Process) -> None:
        how = _wait(process.descriptor)
        if over.acquire(blocking=False):
            ended(f"Ray's {process.name} on this machine ended{how}")

    for process in processes:
        threading.Thread(target=watch, args=(process,), daemon=True).start()
    try:
        yield
    finally:
        over.acquire(blocking=False)


def _wait(descriptor: int) -> str:
    """Wait until a process has ended and close its descriptor; return how it ended if known.

    Its exit code is left for others to read.
    """
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        ended.poll()
        return _how(os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT))
    except ChildProcessError:  # it was started by another process
        return ""
    finally:
        os.close(descriptor)


def _how(result: os.waitid_result | None) -> str:
    if result is None or result.si_code == os.CLD_EXITED:
        return f" (code {result.si_status if result else 0})"
    if result.si_status == signal.SIGBUS:
        return " (SIGBUS: /dev/shm, where it keeps objects, may be full)"
    return f" ({signal.Signals(result.si_status).name})"
