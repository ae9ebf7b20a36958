"""Atomic files and directories: written under another name, flushed to the disk, and renamed.

Lines that do not fit on the disk are not appended in part.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from configs.paths import exists
from records.storage import retried

_appending = threading.RLock()
"""Held while lines are appended: an attempt that is repeated removes what follows its start."""


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file, which replaces ``path`` if the context succeeds."""
    beside = temporary_path(path)
    try:
        yield beside
        _flush(beside)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    # without this a power failure could undo the rename
    _flush(path.parent)


@contextlib.contextmanager
def replace_directory(path: Path) -> Iterator[Path]:
    """Yield an empty temporary directory, which replaces ``path`` if the context succeeds.

    Its parent must exist: where a run directory is not mounted, none must be created.
    As a directory cannot be renamed over another, an existing ``path`` is first renamed to
    ``<name>.replaced``; between the two renames readers may use that one.
    """
    beside, replaced = temporary_path(path), path.with_name(f"{path.name}.replaced")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        yield beside
        for part in (*beside.iterdir(), beside):
            _flush(part)
        if exists(path):
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(path, replaced)
        os.rename(beside, path)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    _flush(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


@retried
def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader sees the old content or the new one, also after a kill."""
    with replace_file(path) as beside:
        beside.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as JSON atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def append(path: Path, lines: str) -> None:
    """Append ``lines``; if they do not fit on the disk, the file stays as it was.

    Otherwise the next line would continue the incomplete one, and readers would skip both. A kill
    at this moment may still leave an incomplete last line. Only one process may append to a file.
    """
    data, sizes = lines.encode(), list[int]()

    @retried
    def attempt(path: Path) -> None:
        with path.open("ab", buffering=0) as file:  # unbuffered: a later flush would fail unseen
            size = file.seek(0, os.SEEK_END)
            if sizes and size > sizes[0]:  # a part that an earlier attempt has written
                file.truncate(sizes[0])
            sizes.append(size)
            written = 0
            try:
                while written < len(data):  # a full disk accepts a part before it fails
                    written += file.write(data[written:])
            except OSError:
                file.truncate(sizes[0])
                raise

    with _appending:
        attempt(path)


def temporary_path(path: Path) -> Path:
    """Return this process's temporary name for a file that is to become ``path``."""
    return path.with_name(f".{path.name}.unfinished-{os.getpid()}")


def _flush(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
