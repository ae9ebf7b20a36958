"""Access rights of pytest's directories, for tests with a second user."""

import tempfile
from pathlib import Path


def open_to_all(directory: Path) -> None:
    """Let other users read ``directory`` and enter its parents, which pytest makes private."""
    top = Path(tempfile.gettempdir())
    for path in (directory, *directory.parents):
        if path == top or top not in path.parents:
            return
        path.chmod(path.stat().st_mode | 0o055)
