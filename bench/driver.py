"""What does the driver cost? Its real code with simulated actors, a GPU each: seconds of CPU for an
iteration, over the seconds that the iteration would take on GPUs.

Counted are pools, ring and scoring, the timeline's lines, and the search for cycles after each
iteration, as a run does it. What stands in for the actors runs in the same process. A signal looks
every 2 ms of CPU time who works, and the share of the stand-ins and of virtual time is left out.
Ray's own part of a call is not in it.
"""

from __future__ import annotations

import gc
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from bench.timing import Options, Ratio
from configs.load import load
from configs.schema import RunConfig
from planning.assumptions import Assumptions
from planning.layouts.choose import Choice
from planning.layouts.gpus import Gpus
from planning.layouts.scenario import Scenario, chosen
from planning.make import described
from policy.precision.accelerators import ACCELERATORS
from records.timeline import Timeline
from simulator.outlook import run

CASES = {
    "SANA": ("sana",),
    "SANA, a prompt's seeds in one task": ("sana", "explore.chunk_size=96"),
    "FLUX.1": ("flux1",),
}
"""Model and changes, with a prompt for each GPU: the shortest iterations on B200, the same with the
fewest calls, and the usual kind of long ones.
"""
KIND = "B200"
ACTORS = (64, 256, 1024)
GOAL = 0.02


def measure(options: Options) -> list[Ratio]:
    """A row for each case and number of rollout actors, with as many prompts in an iteration; its
    iterations are the repeats.
    """
    return [_row(case, count, options.repeats) for count in ACTORS for case in CASES]


def laid_out(config: RunConfig, count: int) -> tuple[Scenario, Choice]:
    """The run on so many GPUs, in the layout that is chosen for them, and the choice."""
    given = Assumptions(gpus=count, accelerator=KIND)
    cpus = given.node_cpus / given.node_gpus
    gpus = [Gpus(KIND, count, ACCELERATORS[KIND].memory_gb, cpus)]
    with described(config) as (family, _):
        return chosen(config, family, gpus, given)


def _row(case: str, count: int, iterations: int) -> Ratio:
    model, *changes = CASES[case]
    config = load(f"{model}-sol_rl-hpsv2", [f"prompts.per_iteration={count}", *changes])
    found, _ = laid_out(config, count)
    meter = Meter()
    with tempfile.TemporaryDirectory() as scratch:
        timeline = Timeline(Path(scratch) / "timeline.jsonl")
        simulated = run(found, iterations, meter.iteration, timeline.record)
    actors = found.config.services.rollout.actors
    driver, seconds = f"driver of {actors}, {case}", meter.seconds
    times = {driver: seconds, "iteration": [simulated.iteration] * iterations}
    each = statistics.median(seconds) / simulated.calls * 1e6
    note = f"{simulated.calls:.0f} calls, {each:.0f} us each, {1e6 / each:,.0f} a second at most"
    return Ratio.of(times, driver, "iteration", GOAL, note)


class Meter:
    """Seconds of CPU of this process in each iteration, without those in which a file of
    ``simulator`` beneath the ring is at work, time is made to jump, or timers are put in order, of
    which only virtual time has many.
    """

    FILES = tuple(f"simulator/{name}.py" for name in ("actors", "machine", "services", "transport"))
    JUMPS = (("cluster/runtime/clock.py", "select"), ("asyncio/events.py", "__lt__"))

    def __init__(self) -> None:
        self._inside = self._looks = 0
        self.seconds: list[float] = []

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """One of them."""
        self._inside = self._looks = 0
        before, began = signal.signal(signal.SIGPROF, self._look), time.process_time()
        signal.setitimer(signal.ITIMER_PROF, 0.002, 0.002)
        try:
            yield
            gc.collect()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
        share = self._inside / max(1, self._looks)
        self.seconds.append((time.process_time() - began) * (1 - share))

    def _look(self, number: int, frame: FrameType | None) -> None:
        self._looks += 1
        while frame is not None:
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            if file.endswith(self.FILES) or any(
                name == jumps and file.endswith(where) for where, jumps in self.JUMPS
            ):
                self._inside += 1
                return
            frame = frame.f_back
