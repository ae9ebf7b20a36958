"""Paths of Unix sockets, whose length the kernel limits."""

from __future__ import annotations

import os
import tempfile

LONGEST = 107
"""Longest path of a Unix socket, in bytes (unix(7))."""
FALLBACK = "/tmp"
"""Directory that every Linux system has."""


def short_directory(below: int) -> str:
    """Return the directory of temporary files, or ``FALLBACK`` if that is too long.

    ``below`` is the number of bytes that follow the directory in the path of a socket.
    """
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) + below <= LONGEST else FALLBACK
