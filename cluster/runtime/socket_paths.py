"""Directories for Unix sockets, whose paths the kernel limits.

``TMPDIR`` may be long where a scheduler makes a directory for each job.
"""

from __future__ import annotations

import os
import tempfile

LONGEST = 107
"""Longest path of a Unix socket, in bytes (unix(7))."""
FALLBACK = "/tmp"
"""Directory that every Linux system has."""
LONGEST_OF_RAY = LONGEST - len(
    "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
)
"""Longest directory that Ray can make its own in, in bytes."""


def short_directory(below: int) -> str:
    """Return the directory of temporary files, or ``FALLBACK`` if that is too long.

    ``below`` is the number of bytes that follow the directory in the path of a socket.
    """
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) + below <= LONGEST else FALLBACK


def refused_by_ray(directory: str) -> str | None:
    """Return a reason if Ray cannot make its sockets in this directory, else None."""
    length = len(os.fsencode(directory))
    if length <= LONGEST_OF_RAY:
        return None
    return f"has {length} bytes, and Ray's sockets need a directory of at most {LONGEST_OF_RAY}"
