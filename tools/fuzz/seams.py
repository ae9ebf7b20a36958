"""Patches at the points where commands would start processes or a long measurement.

Everything before these points is the command's own code. ``tests/test_fuzz.py`` compares refusals
with those of real processes; the tests of whole runs show that accepted commands do start.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

STARTS = (
    "cluster.driver.train:join_or_start_ray",
    "cluster.driver.offline:join_or_start_ray",
    "analysis.compare.runner:_Child.run",
    "analysis.fidelity.measure:measure",
    "analysis.signal.measure:GradientMeasurement.run",
    "analysis.tune.command:measure",
    "ray:init",
)
"""Functions that start or join something, or compute for minutes."""
SHORT = (
    ("cluster.jobs.dashboard:ANSWER_S", (1.0, 1.0)),
    ("cluster.jobs.live_runs:LISTENER_S", 1.0),
    ("cluster.jobs.job_log:PAUSE_S", 0.05),
    ("cluster.jobs.job_log:SILENCE_S", 1.0),
    ("cluster.jobs.job_log:GIVE_UP_S", 1.0),
)
"""Time constants of modules that wait for a server, and shorter values for fuzzing."""


class Reached(Exception):
    """Raised at the point where a command accepted its input and would start something."""


@contextlib.contextmanager
def seams() -> Iterator[None]:
    """Within the block, raise ``Reached`` instead of starting anything."""

    def stop(*_: object, **__: object) -> None:
        raise Reached

    with contextlib.ExitStack() as stack:
        for name, replacement in [*((name, stop) for name in STARTS), *SHORT]:
            module, _, path = name.partition(":")
            owner = importlib.import_module(module)
            *outer, last = path.split(".")
            for part in outer:
                owner = getattr(owner, part)
            stack.enter_context(mock.patch.object(owner, last, replacement))
        stack.enter_context(mock.patch("cluster.jobs.submit.stage_tree", _bare_tree))
        # Ray may be connected by tests in this process, but never by the command
        stack.enter_context(mock.patch("ray.is_initialized", lambda: False))
        yield


def _bare_tree(into: Path) -> None:
    """Replace the copy of the sources, which would take longer than everything else."""
    into.mkdir()
