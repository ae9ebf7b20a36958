"""Benchmarks, run by ``python -m bench``.

Their results are ratios measured in one run, so that they are meaningful on any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that ``bench.gpu_check`` can report missing packages
    from bench.timing import Options, Ratio

NAMES = (
    "ring",
    "loop",
    "scale",
    "publish",
    "pack",
    "step",
    "explorer",
    "rewards",
    "start",
    "plan",
    "driver",
    "nodes",
)

COUNTS = ("packing", "passes", "preference")
"""Benchmarks that count or simulate instead of timing; each has its own options."""


def benchmark(name: str) -> Callable[[Options], list[Ratio]]:
    """Return the function ``measure`` of a benchmark's module."""
    return import_module(f"bench.{name}").measure
