"""Checksum of a directory, by which published results identify a model."""

from __future__ import annotations

import hashlib
from pathlib import Path


def checksum(folder: Path) -> str:
    """Return the sha256 (hex) over the sorted relative paths and contents of all files.

    Raises FileNotFoundError for an empty folder.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        raise FileNotFoundError(f"no files in {folder}")
    total = hashlib.sha256()
    for path in files:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return total.hexdigest()


if __name__ == "__main__":
    print(checksum(Path(__file__).parent / "model"))
