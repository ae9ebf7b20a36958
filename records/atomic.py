"""Files and directories that are whole or absent: written beside, flushed to the disk, renamed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write a file at; once the block ends well, that file is ``path``."""
    beside = unfinished(path)
    try:
        yield beside
        _flush(beside)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    # a power failure undoes the rename unless the directory is on the disk too
    _flush(path.parent)


@contextlib.contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """Give an empty directory to fill with files; once the block ends well, it is ``path``.

    A directory cannot be renamed over another. An older ``path`` is called ``<name>.replaced`` for
    the instant between two renames, and a reader that finds no ``path`` may use that.
    """
    beside, replaced = unfinished(path), path.with_name(f"{path.name}.replaced")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        yield beside
        for each in (*beside.iterdir(), beside):
            _flush(each)
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(path, replaced)
        os.rename(beside, path)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    _flush(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file at once: a reader, or a kill, finds the old one or the new one."""
    with replacing(path) as beside:
        beside.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """``write_bytes`` of UTF-8 text."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: object) -> None:
    """``write_text`` of ``value`` as JSON."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def unfinished(path: Path) -> Path:
    """Where this process writes a file before it is renamed to ``path``."""
    return path.with_name(f".{path.name}.unfinished-{os.getpid()}")


def _flush(path: Path) -> None:
    """Wait until the disk has a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
