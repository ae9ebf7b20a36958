"""Command line options, log and output shared by the commands that build the shipped models."""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shapes.checksum import checksum

HERE = Path(__file__).parent


def parser(
    module: str, doc: str | None, minutes: float, of: str, out: Path, threads: int = 2
) -> argparse.ArgumentParser:
    """Return a parser with ``--minutes``, ``--threads`` and ``--out`` for ``python -m module``.

    The first line of ``doc`` is the description; ``of`` names what the minutes are spent on.
    """
    description = (doc or "").splitlines()[0]
    arg_parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    arg_parser.add_argument(
        "--minutes", type=float, default=minutes, help=f"training time {of}".strip()
    )
    arg_parser.add_argument("--threads", type=int, default=threads)
    arg_parser.add_argument("--out", type=Path, default=out, help="the directory to write")
    return arg_parser


def add_work(found: argparse.ArgumentParser, default: str = "build/shapes") -> None:
    """Add ``--work``, the directory of the training state."""
    help_text = "where training state is kept, to resume from"
    found.add_argument("--work", type=Path, default=Path(default), help=help_text)


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Yield an empty directory name next to ``out``; on success it replaces ``out``.

    The block has to create and fill the directory.
    """
    fresh = out.with_name(out.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    yield fresh
    shutil.rmtree(out, ignore_errors=True)
    os.replace(fresh, out)


def log(line: str) -> None:
    """Print a line with the time of day."""
    print(time.strftime("%H:%M:%S"), line, flush=True)


def log_written(out: Path) -> None:
    """Log the size and checksum of a finished build."""
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    log(f"wrote {out}: {size / 1e6:.1f} MB, checksum {checksum(out)}")
