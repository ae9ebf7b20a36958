"""Directories of pytest that another user of the machine may look into."""

import tempfile
from pathlib import Path


def open_to_all(directory: Path) -> None:
    """Every directory above it too, up to the system's: pytest keeps its own for one user."""
    top = Path(tempfile.gettempdir())
    for path in (directory, *directory.parents):
        if path == top or top not in path.parents:
            return
        path.chmod(path.stat().st_mode | 0o055)
