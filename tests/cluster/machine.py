"""Faults of a machine, simulated without harm to others: full disk, no memory, stopped driver,
clock jumps.

The disk is a small one of its own, and what Ray reads as the machine's memory is a file. Only this
process and its children see both, because they have their own view of the file system. That needs
root on Linux; ``missing`` says what cannot be simulated, and why.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

DISK_BYTES = 64 << 20
NEW_MOUNTS, RECURSIVE, PRIVATE, BIND = 0x20000, 0x4000, 1 << 18, 0x1000  # of sched.h and mount.h
DETACH = 2
_BOUND: set[str] = set()
MEMINFO = "/proc/meminfo"
GROUPS = Path("/sys/fs/cgroup/memory")
HEADROOM = 8 << 20
"""Bytes that an actor may still allocate before the kernel kills it."""


class Machine:
    """The state of this machine, as the runs of this process see it."""

    def __init__(self, root: Path):
        self.disk, self._meminfo = root / "disk", root / "meminfo"
        self._group: Path | None = None
        self._frozen: subprocess.Popen[bytes] | None = None
        self._jumped: Any = None
        self.offset_s = 0.0

    @staticmethod
    def missing() -> dict[str, str]:
        """Return the kinds of ``faults.WORDS`` that cannot be simulated here, with the reasons."""
        if sys.platform != "linux" or os.geteuid() != 0:
            return dict.fromkeys(("disk", "monitor", "memory"), "it takes root on Linux")
        if not (GROUPS / "memory.limit_in_bytes").exists():
            return {"memory": f"there are no memory cgroups of version 1 in {GROUPS}"}
        return {}

    def prepare(self) -> None:
        """Give this process its own view of files; called once, before Ray is started."""
        if {"disk", "monitor"} & set(self.missing()):
            return
        self.low_memory(False)
        own_mounts({str(self._meminfo): MEMINFO})
        self.disk.mkdir(parents=True, exist_ok=True)
        size = f"size={DISK_BYTES}".encode()
        libc = ctypes.CDLL(None, use_errno=True)
        _check(libc.mount(b"tmpfs", os.fsencode(self.disk), b"tmpfs", 0, size))

    # ---- a disk without room

    def fill(self) -> None:
        """Write until the disk is full."""
        with (self.disk / "ballast").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError:
                return

    def empty(self) -> None:
        """Make room on the disk again."""
        (self.disk / "ballast").unlink(missing_ok=True)

    # ---- memory

    def low_memory(self, low: bool) -> None:
        """Let Ray's memory monitors read that one per cent of the memory is left, or three
        quarters.

        While it is low, they kill working processes of the nodes, the newest first.
        """
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1024
        left = total // 100 if low else 3 * total // 4
        rows = {"MemTotal": total, "MemFree": left, "MemAvailable": left, "Buffers": 0, "Cached": 0}
        rows |= dict.fromkeys(("Active", "Inactive", "SReclaimable", "Shmem"), 0)
        rows |= {"SwapTotal": 0, "SwapFree": 0}
        text = "".join(f"{name + ':':16}{value:8} kB\n" for name, value in rows.items())
        self._meminfo.parent.mkdir(parents=True, exist_ok=True)
        self._meminfo.write_text(text)

    def starve(self, pid: int) -> None:
        """Let the process allocate only ``HEADROOM`` more; beyond that the kernel kills it
        (SIGKILL).

        It continues until then.
        """
        if self._group is None:
            self._group = GROUPS / f"sol-rl-{os.getpid()}"
            self._group.mkdir(exist_ok=True)
        (self._group / "cgroup.procs").write_text(str(pid))
        used = int((self._group / "memory.usage_in_bytes").read_text())
        (self._group / "memory.limit_in_bytes").write_text(str(used + HEADROOM))

    # ---- the driver

    def freeze(self, seconds: float) -> None:
        """Stop this process (SIGSTOP), and continue it ``seconds`` later."""
        script = f"kill -STOP {os.getpid()}; sleep {seconds}; kill -CONT {os.getpid()}"
        self._frozen = subprocess.Popen(["sh", "-c", script])

    def jump(self, seconds: float) -> None:
        """Let the wall clock of this process jump; actors do not read it."""
        real, self.offset_s = time.time, seconds
        self._jumped = mock.patch("time.time", lambda: real() + seconds)
        self._jumped.start()

    # ----

    def repair(self) -> None:
        """Undo all faults before the next run."""
        if self._frozen is not None:
            self._frozen.wait()
            self._frozen = None
        if self._jumped is not None:
            self._jumped.stop()
            self._jumped, self.offset_s = None, 0.0
        self.empty()
        if self._meminfo.exists():
            self.low_memory(False)
        if self._group is not None and not (self._group / "cgroup.procs").read_text():
            self._group.rmdir()
            self._group = None


def own_mounts(binds: Mapping[str, str]) -> None:
    """Let this process and its children see each file or folder of ``binds`` in the place of
    another.

    Other processes do not see that, and it replaces earlier such calls.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(NEW_MOUNTS))
    _check(libc.mount(None, b"/", None, RECURSIVE | PRIVATE, None))
    for source, place in binds.items():
        if place in _BOUND:
            _check(libc.umount2(os.fsencode(place), DETACH))
        _BOUND.add(place)
        if not os.path.isfile(source):
            os.makedirs(source, exist_ok=True)
            os.makedirs(place, exist_ok=True)
        _check(libc.mount(os.fsencode(source), os.fsencode(place), None, BIND, None))


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
