"""What the commands that build the shipped models share: their options, log and output."""

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
    """``--minutes`` ``of`` something, ``--threads`` and ``--out`` of ``python -m module``."""
    first = (doc or "").splitlines()[0]
    found = argparse.ArgumentParser(prog=f"python -m {module}", description=first)
    found.add_argument("--minutes", type=float, default=minutes, help=f"training time {of}".strip())
    found.add_argument("--threads", type=int, default=threads)
    found.add_argument("--out", type=Path, default=out, help="the directory to write")
    return found


def add_work(found: argparse.ArgumentParser, default: str = "build/shapes") -> None:
    """``--work``."""
    text = "where training state is kept, to resume from"
    found.add_argument("--work", type=Path, default=Path(default), help=text)


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A neighbour directory to fill, which then takes the place of ``out``."""
    fresh = out.with_name(out.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    yield fresh
    shutil.rmtree(out, ignore_errors=True)
    os.replace(fresh, out)


def log(line: str) -> None:
    """One line with the time."""
    print(time.strftime("%H:%M:%S"), line, flush=True)


def log_written(out: Path) -> None:
    """What a finished build ends with."""
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    log(f"wrote {out}: {size / 1e6:.1f} MB, checksum {checksum(out)}")
