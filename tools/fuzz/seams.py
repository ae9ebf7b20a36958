"""Where commands would start processes or a long measurement: the fuzzer stops them there.

Everything before is the command's own. ``tests/test_fuzz.py`` compares refusals with those of real
processes; that what is accepted does start, the tests of whole runs show.
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
    "analysis.compare.running:_Child.run",
    "analysis.fidelity.measure:measure",
    "analysis.signal.measure:Measuring.run",
    "analysis.tune.command:measure",
    "ray:init",
)
"""Functions behind which something is started, joined, or computed for minutes."""
SHORT = (
    ("cluster.jobs.dashboard:ANSWER_S", (1.0, 1.0)),
    ("cluster.jobs.live_runs:LISTENER_S", 1.0),
    ("cluster.jobs.job_log:PAUSE_S", 0.05),
    ("cluster.jobs.job_log:SILENCE_S", 1.0),
    ("cluster.jobs.job_log:GIVE_UP_S", 1.0),
)
"""How long commands wait for a server: here a second each, in a run as those modules say."""


class Reached(Exception):
    """The command took its input, and would start something now."""


@contextlib.contextmanager
def seams() -> Iterator[None]:
    """Within the block nothing is started: what would be raises ``Reached``."""

    def stop(*_: object, **__: object) -> None:
        raise Reached

    with contextlib.ExitStack() as stack:
        for name, instead in [*((name, stop) for name in STARTS), *SHORT]:
            module, _, path = name.partition(":")
            owner = importlib.import_module(module)
            *outer, last = path.split(".")
            for part in outer:
                owner = getattr(owner, part)
            stack.enter_context(mock.patch.object(owner, last, instead))
        stack.enter_context(mock.patch("cluster.jobs.submit.stage_tree", _bare_tree))
        # a connection that tests of this process have is none that a command made
        stack.enter_context(mock.patch("ray.is_initialized", lambda: False))
        yield


def _bare_tree(into: Path) -> None:
    """In place of a copy of the sources, which would take longer than all else."""
    into.mkdir()
