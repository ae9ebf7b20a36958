"""Benchmarks whose results are ratios taken in one run, so that they mean something on any machine:
``python -m bench``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that ``bench.gpu_check`` can say which packages are missing
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
)

COUNTS = ("packing", "passes", "preference")
"""What is counted or simulated rather than timed, with options of its own."""


def benchmark(name: str) -> Callable[[Options], list[Ratio]]:
    """The function ``measure`` of one benchmark's module."""
    return import_module(f"bench.{name}").measure
