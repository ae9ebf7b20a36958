"""What does the driver cost? Its real code with simulated actors, a GPU each: seconds of CPU for an
iteration, over the seconds that the iteration would take on GPUs.

What stands in for the actors runs in the same process and is counted, so that the truth is less.
"""

from __future__ import annotations

import time

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
    start = time.process_time()
    found = run(scenario, 2)
    # what it takes to start the actors is the same in both
    seconds = time.process_time() - start - one
    actors = scenario.config.services.rollout.actors
    note = f"{once.calls:.0f} calls, {once.calls / seconds:.0f} per second of the driver"
    times = {f"driver of {actors}": [seconds], "iteration": [found.iteration]}
    return Ratio.of(times, f"driver of {actors}", "iteration", GOAL, note)
