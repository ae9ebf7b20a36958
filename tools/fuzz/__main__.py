"""Test many random inputs of every kind; ``make test`` tests a few of each."""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tools.fuzz.target import Target
from tools.fuzz.targets import targets

SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)

MEMORY = 10 << 30
"""Limit of the process's memory in bytes, so that a hostile size cannot exhaust the machine."""


def fuzz(target: Target, examples: int, seed: int) -> int:
    """Test ``examples`` inputs, or fewer for a slow target, and return how many were tested.

    Raises the exception of the first failing input, after hypothesis has shrunk it.
    """
    tried = 0
    count = max(1, examples // target.cost)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.chmod(folder, 0o755)  # some inputs are read as an unprivileged user

        @seeded(seed)
        @settings(
            max_examples=count,
            deadline=None,
            derandomize=False,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=SLOW_IS_FINE,
        )
        @given(target.inputs)
        def one(given: Any) -> None:
            nonlocal tried
            tried += 1
            target.holds(Path(folder), given)

        one()
    return tried


def _failures(error: BaseException) -> Iterator[str]:
    """Yield one line per failure that hypothesis found, with its shrunk input."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _failures(inner)
        return
    frame = traceback.extract_tb(error.__traceback__)[-1]
    notes = " ".join(getattr(error, "__notes__", []))
    where = f"{frame.filename}:{frame.lineno}"
    yield f"{type(error).__name__}: {error} ({where}) {notes}"


def run(names: list[str], examples: int, seed: int) -> int:
    """Test the named targets, print one line each and return how many failed."""
    failed = 0
    for name in names:
        began = time.perf_counter()
        try:
            result = f"{fuzz(targets()[name], examples, seed)} inputs"
        # any exception is a finding
        except Exception as error:
            failed += 1
            result = "FAILED: " + "; ".join(_failures(error))
        print(f"{name:16} {time.perf_counter() - began:6.1f} s  {result}", flush=True)
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=2000, help="inputs per target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", choices=sorted(targets()))
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    sys.exit(1 if run(options.target or list(targets()), options.examples, options.seed) else 0)
