"""Definition of a fuzz target: inputs of one kind, and the check that must hold for each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

RUNS = Path(__file__).parents[2] / "tests" / "data" / "runs"


@dataclass(frozen=True)
class Target:
    """Inputs of one kind, and the check that must hold for each, in a folder of its own."""

    inputs: st.SearchStrategy[Any]
    holds: Callable[[Path, Any], None]
    cost: int = 1  # divides the number of inputs: how much slower it is than the fastest target


def copied(source: Path, target: Path) -> Path:
    """Replace ``target`` by a fresh copy of ``source``."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))


def example_run() -> Path:
    """Return the newest run directory that is kept for tests."""
    return sorted(RUNS.glob("*/*"))[-1]
