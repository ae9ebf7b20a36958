"""The directory in which Ray makes its own, for sockets and logs: it may be too long or full."""

from __future__ import annotations

import os

import ray

from cluster.runtime.socket_paths import FALLBACK, LONGEST

VARIABLE = "RAY_TMPDIR"
"""Environment variable with this directory; without it Ray takes TMPDIR."""
LONGEST_DIRECTORY = LONGEST - len(
    "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
)
"""Longest directory, in bytes; the last number is the largest of a process."""
LEAST_BYTES = 2**20
"""Room that Ray's processes need to start."""
CROWDED = 0.9
"""Use of a disk from which on it deserves attention; Ray's own limit is 0.95
(``RAY_local_fs_capacity_threshold``).
"""


def too_long(directory: str) -> str | None:
    """Return a reason if Ray's sockets do not fit into this directory, else None."""
    length = len(os.fsencode(directory))
    if length <= LONGEST_DIRECTORY:
        return None
    return f"has {length} bytes, and Ray's sockets need a directory of at most {LONGEST_DIRECTORY}"


def replaced() -> str | None:
    """Return a reason if Ray on this machine cannot use TMPDIR as it would, else None."""
    directory = os.environ.get("TMPDIR", FALLBACK)
    if VARIABLE in os.environ or not (why := too_long(directory)):
        return None
    return f"TMPDIR = {directory!r}: {why}: Ray's files are in {FALLBACK}/ray"


def chosen() -> str:
    """Return the directory in which Ray on this machine makes its own."""
    return FALLBACK if replaced() else os.environ.get(VARIABLE, os.environ.get("TMPDIR", FALLBACK))


def full(directory: str) -> str | None:
    """Return a reason if the disk of this directory has no room for Ray's logs, else None.

    Processes of Ray do not start without it, and do not say why. None if the directory is missing.
    """
    try:
        disk = os.statvfs(directory)
    except OSError:
        return None
    if disk.f_bavail * disk.f_frsize >= LEAST_BYTES and (disk.f_favail or not disk.f_files):
        return None
    return f"the disk of {directory} is full, and Ray's processes need room for their logs"


def nearly_full(directory: str) -> str | None:
    """Return how full the disk of this directory is if it is over ``CROWDED``, else None."""
    disk = os.statvfs(directory)
    used = 1 - disk.f_bavail / disk.f_blocks if disk.f_blocks else 0.0
    return f"{directory} is {used:.0%} full" if used > CROWDED else None


def full_here() -> str | None:
    """Return what ``full`` returns for the directory of the Ray that this process uses."""
    return full(ray.get_runtime_context().get_temp_dir()) if ray.is_initialized() else None
