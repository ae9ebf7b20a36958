"""Whether a path exists, and what it is.

Unlike the methods of ``pathlib.Path``, which hide all errors since Python 3.14, these raise OSError
where the answer is not known: storage that does not answer or must not be read is not empty.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""Errors that say that there is nothing at a path."""


def exists(path: Path) -> bool:
    """Return True if there is something at ``path``; links are followed."""
    return _mode(path) is not None


def is_file(path: Path) -> bool:
    """Return True if there is a regular file at ``path``; links are followed."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def is_dir(path: Path) -> bool:
    """Return True if there is a directory at ``path``; links are followed."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def _mode(path: Path) -> int | None:
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno not in ABSENT:
            raise
    except ValueError:  # a null byte
        pass
    return None
