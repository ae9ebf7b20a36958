"""What does the driver cost? Its real code with simulated actors, a GPU each: seconds of CPU for an
iteration, over the seconds that the iteration would take on GPUs.

What stands in for the actors runs in the same process. A signal looks every 2 ms of CPU time who
works, and the share of the stand-ins and of virtual time is left out. Ray's own part of a call is
not in it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from bench.timing import Options, Ratio
from configs.load import load
from planning.assumptions import Assumptions
from planning.make import make_plan
from simulator.outlook import run

PRESET = "sana-sol_rl-hpsv2"
"""The preset with the shortest iterations on a B200 for each prompt of a GPU."""
ACTORS = (64, 256, 1024)
GOAL = 0.02


def measure(options: Options) -> list[Ratio]:
    """A row for each number of rollout actors, with as many prompts in an iteration."""
    return [_row(count) for count in ACTORS]


def _row(count: int) -> Ratio:
    config = load(PRESET, [f"prompts.per_iteration={count}"])
    plan = make_plan(config, Assumptions(gpus=count, accelerator="B200"))
    assert plan.scenarios is not None
    scenario = plan.scenarios.mine
    start = time.process_time()
    once = run(scenario, 1)
    one = time.process_time() - start
    watch = StandIns()
    start = time.process_time()
    with watch.looking():
        found = run(scenario, 2)
    # what it takes to start the actors is the same in both
    both = time.process_time() - start - one
    seconds = both * (1 - watch.share)
    actors = scenario.config.services.rollout.actors
    note = (
        f"{once.calls:.0f} calls, {once.calls / seconds:.0f} per second of the driver;"
        f" {both:.2f} s with the stand-ins"
    )
    times = {f"driver of {actors}": [seconds], "iteration": [found.iteration]}
    return Ratio.of(times, f"driver of {actors}", "iteration", GOAL, note)


class StandIns:
    """The share of CPU time in which a file of ``simulator`` beneath the ring is at work, or time
    is made to jump.
    """

    FILES = tuple(f"simulator/{name}.py" for name in ("actors", "machine", "services", "transport"))
    JUMPS = ("cluster/runtime/clock.py", "select")

    def __init__(self) -> None:
        self._inside = self._looks = 0

    @property
    def share(self) -> float:
        """Of the looks so far."""
        return self._inside / max(1, self._looks)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look every 2 ms of this process's CPU time."""
        before = signal.signal(signal.SIGPROF, self._look)
        signal.setitimer(signal.ITIMER_PROF, 0.002, 0.002)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)

    def _look(self, number: int, frame: FrameType | None) -> None:
        self._looks += 1
        while frame is not None:
            file, jumps = frame.f_code.co_filename, frame.f_code.co_name == self.JUMPS[1]
            if file.endswith(self.FILES) or (jumps and file.endswith(self.JUMPS[0])):
                self._inside += 1
                return
            frame = frame.f_back
