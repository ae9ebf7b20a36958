"""Benchmark of the driver's CPU time per iteration, relative to the iteration's time on GPUs.

It runs the real driver code with simulated actors, one GPU each. Included are pools, ring, scoring,
timeline records, and the garbage collection after each iteration, as in a run. The simulated actors
run in the same process: a signal samples the stack every 2 ms of CPU time, and the share of
simulated actors and of virtual time is subtracted. Ray's own share of a call is not included.
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
from planning.plan import open_architecture
from policy.precision.accelerators import ACCELERATORS
from records.timeline import Timeline
from simulator.outlook import run

CASES = {
    "SANA": ("sana",),
    "SANA, a prompt's seeds in one task": ("sana", "explore.chunk_size=96"),
    "FLUX.1": ("flux1",),
}
"""Model and overrides of each case; a prompt per GPU.

The cases are the shortest iterations on B200, the same with the fewest calls, and typical long
iterations.
"""
KIND = "B200"
ACTORS = (64, 256, 1024)
GOAL = 0.02


def measure(options: Options) -> list[Ratio]:
    """Return a ratio per case and number of rollout actors, with as many prompts per iteration.

    Each of its iterations is one repeat.
    """
    return [_row(case, count, options.repeats) for count in ACTORS for case in CASES]


def laid_out(config: RunConfig, count: int) -> tuple[Scenario, Choice]:
    """Return (scenario, layout choice) of a run on ``count`` GPUs."""
    assumptions = Assumptions(gpus=count, accelerator=KIND)
    cpus = assumptions.node_cpus / assumptions.node_gpus
    gpus = [Gpus(KIND, count, ACCELERATORS[KIND].memory_gb, cpus)]
    with open_architecture(config) as (family, _):
        return chosen(config, family, gpus, assumptions)


def _row(case: str, count: int, iterations: int) -> Ratio:
    model, *changes = CASES[case]
    config = load(f"{model}-sol_rl-hpsv2", [f"prompts.per_iteration={count}", *changes])
    scenario, _ = laid_out(config, count)
    meter = Meter()
    with tempfile.TemporaryDirectory() as scratch:
        timeline = Timeline(Path(scratch) / "timeline.jsonl")
        simulated = run(scenario, iterations, meter.iteration, timeline.record)
    actors = scenario.config.services.rollout.actors
    driver, seconds = f"driver of {actors}, {case}", meter.seconds
    times = {driver: seconds, "iteration": [simulated.iteration] * iterations}
    call_us = statistics.median(seconds) / simulated.calls * 1e6
    note = (
        f"{simulated.calls:.0f} calls, {call_us:.0f} us each, {1e6 / call_us:,.0f} a second at most"
    )
    return Ratio.of(times, driver, "iteration", GOAL, note)


class Meter:
    """Meter of this process's CPU seconds per iteration, without those of the simulation.

    Excluded are the files of ``simulator`` below the ring, the advancing of virtual time, and the
    sorting of timers, which are many only with virtual time.
    """

    FILES = tuple(f"simulator/{name}.py" for name in ("actors", "machine", "services", "transport"))
    JUMPS = (("cluster/runtime/clock.py", "select"), ("asyncio/events.py", "__lt__"))

    def __init__(self) -> None:
        self._simulation_samples = self._samples = 0
        self.seconds: list[float] = []

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Measure the iteration that runs within the context."""
        self._simulation_samples = self._samples = 0
        before, began = signal.signal(signal.SIGPROF, self._sample_stack), time.process_time()
        signal.setitimer(signal.ITIMER_PROF, 0.002, 0.002)
        try:
            yield
            gc.collect()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
        share = self._simulation_samples / max(1, self._samples)
        self.seconds.append((time.process_time() - began) * (1 - share))

    def _sample_stack(self, number: int, frame: FrameType | None) -> None:
        self._samples += 1
        while frame is not None:
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            if file.endswith(self.FILES) or any(
                name == function and file.endswith(suffix) for suffix, function in self.JUMPS
            ):
                self._simulation_samples += 1
                return
            frame = frame.f_back
