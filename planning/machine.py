"""What this process may use of its machine: cores and memory, within the limits of its container.

Limits are those of control groups (cgroups), which Docker, Kubernetes and Slurm set; both versions
are read. Where /proc does not tell, there are none.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

PROCESS = Path("/proc/self")


def usable_cores(process: Path = PROCESS) -> int:
    """Return the number of cores that this process may use, at least 1.

    A limit on CPU time of, say, 1.5 cores counts as 2.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    shares = [
        quota / period
        for group in _groups("cpu", process)
        for quota, period in [_cpu_time(group)]
        if quota > 0
    ]
    return max(1, min([affinity or 1, *map(math.ceil, shares)]))


def usable_memory(process: Path = PROCESS) -> int:
    """Return the bytes of memory that this process and its siblings may use."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [
        int(limit)
        for group in _groups("memory", process)
        for name in ("memory.max", "memory.limit_in_bytes")
        if (limit := _read(group / name)).isdigit()
    ]
    return min([physical, *limits])


def killed_for_memory(process: Path = PROCESS) -> int:
    """Return how many processes of this control group the kernel has killed for lack of memory."""
    for group in _groups("memory", process):
        for name in ("memory.events", "memory.oom_control"):
            counts = dict(line.split(maxsplit=1) for line in _read(group / name).splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0


class Mount(NamedTuple):
    """A mounted file system, as a process sees it."""

    device: str  # its numbers, such as "0:27"
    root: str  # the directory of the file system that is mounted
    directory: str
    kind: str  # such as "tmpfs"
    options: list[str]  # those of the file system


def mounts(process: Path = PROCESS) -> Iterator[Mount]:
    """Yield the mounts of a process, whose directory in /proc is given."""
    for line in _read(process / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, system = before.split(), after.split()
        if len(fields) >= 5 and system:
            yield Mount(fields[2], fields[3], fields[4], system[0], system[-1].split(","))


def _cpu_time(group: Path) -> tuple[int, int]:
    """Return (quota, period) of CPU time in microseconds; a quota of 0 stands for no limit."""
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if not period:
        quota, period = (_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return (int(quota), int(period)) if quota.isdigit() and period.isdigit() else (0, 1)


def _groups(controller: str, process: Path) -> Iterator[Path]:
    """Yield the directories of the process's control group and of its parents, innermost first."""
    lines = [line.split(":", 2) for line in _read(process / "cgroup").splitlines()]
    for number, controllers, group in lines:
        if controller in controllers.split(",") or (number == "0" and not controllers):
            for mount in mounts(process):
                if _has(mount, controllers):
                    yield from _upwards(mount, PurePosixPath(group))


def _upwards(mount: Mount, group: PurePosixPath) -> Iterator[Path]:
    """Yield the directory of a group and those of its parents that are mounted there."""
    top = Path(mount.directory)
    # a container may see another name of its group than the mount does
    if group.is_relative_to(mount.root) and ".." not in group.parts:
        directory = top / group.relative_to(mount.root)
        while directory != top:
            yield directory
            directory = directory.parent
    yield top


def _has(mount: Mount, controllers: str) -> bool:
    """Return True if these controllers are mounted there; version 2 names none."""
    kind = "cgroup" if controllers else "cgroup2"
    return mount.kind == kind and set(controllers.split(",")) <= {*mount.options, ""}


def _read(file: Path) -> str:
    try:
        # a directory may have any bytes in its name
        return file.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return ""
