"""What a target is: inputs of one kind, and what must hold for each of them."""

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
    """Inputs of one kind, and what must hold for each, in a folder of its own."""

    inputs: st.SearchStrategy[Any]
    holds: Callable[[Path, Any], None]
    cost: int = 1  # how many times slower than the quickest: so many fewer inputs


def copied(source: Path, target: Path) -> Path:
    """A fresh copy, in place of the one of the input before."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))


def example_run() -> Path:
    """The newest run directory kept for tests."""
    return sorted(RUNS.glob("*/*"))[-1]
