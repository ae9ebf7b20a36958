"""Where the object store of this node keeps its objects: in memory, or on a disk."""

from __future__ import annotations

import re
from pathlib import Path

import ray

from planning.machine import PROCESS, mounts

IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
"""Types of file systems that are in memory."""
SHARED_MEMORY = "/dev/shm"
HEX = "([0-9a-f]+)"
MAPPED = re.compile(rf"^{HEX}-{HEX} \S+ \S+ {HEX}:{HEX} \d+ +(/.*)/plasma\w+( \(deleted\))?$")
"""A line of /proc/PID/maps: addresses, the device's numbers, and the directory of Ray's store."""
LEAST_STORE = 2**26
"""Smaller maps, bytes, are single objects that Ray puts on a disk if a store is full."""
AN_OBJECT = 2**18
"""Size of an object that Ray keeps in the store, not beside its reference, bytes."""


def directory_on_disk(process: Path = PROCESS) -> str | None:
    """Return the directory of this node's object store if it is on a disk, else None.

    Ray uses a disk where /dev/shm is smaller than the store, as in containers, which have 64 MB
    unless they are given more; it says so only in the log of the node's start. None also without
    Ray, and where /proc does not tell.
    """
    if not ray.is_initialized():
        return None
    ray.put(bytes(AN_OBJECT))  # a process maps the store with its first object
    return mapped_on_disk(process)


def mapped_on_disk(process: Path) -> str | None:
    """Return the directory of the store that a process has mapped if it is on a disk, else None.

    ``process`` is its directory in /proc.
    """
    try:
        maps = (process / "maps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    in_memory = {mount.device for mount in mounts(process) if mount.kind in IN_MEMORY}
    for line in maps.splitlines():
        found = MAPPED.match(line)
        if found is None:
            continue
        start, end, major, minor = (int(number, 16) for number in found.groups()[:4])
        directory = found[5]
        on_disk = f"{major}:{minor}" not in in_memory and directory != SHARED_MEMORY
        if on_disk and end - start >= LEAST_STORE:
            return directory
    return None
