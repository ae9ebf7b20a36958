"""Benchmark of exploring one iteration's tasks with two rollout actors relative to one."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from actors.messages import ChunkKey, ExploreChunk
from bench.timing import Options, Ratio, ray_for, silent
from cluster.driver.services import ActorServices
from configs.load import parse
from configs.prompts import prompts_of_iteration, read_prompts
from configs.schema import RunConfig
from policy.sampling.noise import stream_seed
from records.rundir import RunDirectory

TIMES = ("one actor", "two actors")
GOAL = 1 / 1.56


def measure(options: Options) -> list[Ratio]:
    """Return time with two actors over time with one; 0.5 is perfect, given cores for both."""
    with ray_for(options.config), tempfile.TemporaryDirectory(prefix="sol-rl-bench-") as scratch:
        times = asyncio.run(_alternate(options, Path(scratch)))
    images = options.config.prompts.per_iteration * options.config.explore.pool_size
    ratio = Ratio.of(times, "two actors", "one actor")
    rates = ", ".join(f"{name} {images / min(times[name]):.1f}" for name in TIMES)
    note = f"speed-up {1 / ratio.value:.2f}; best images/s: {rates}"
    return [Ratio.of(times, "two actors", "one actor", GOAL, note)]


def _with_actors(config: RunConfig, count: int) -> RunConfig:
    tree = config.model_dump(mode="json")
    tree["services"]["rollout"]["actors"] = count
    return parse(tree | {"name": f"{config.name[:80]}-bench-{count}", "arm": "sol_rl"})


async def _alternate(options: Options, scratch: Path) -> dict[str, list[float]]:
    configs, rundir = [_with_actors(options.config, n) for n in (1, 2)], RunDirectory(scratch)
    rundir.create(configs[0])  # the learner requires it
    groups = [ActorServices(config, rundir, silent) for config in configs]
    one, two = groups
    one.only("encoder", "learner", "rollout")
    two.only("rollout")
    try:
        for services in groups:
            await services.start()
        for services in groups:
            await services.weights.publish(0, one.learner, services.rollout_pool)
        work = await _tasks(one)
        times: dict[str, list[float]] = {name: [] for name in TIMES}
        for turn in range(options.repeats + 1):
            for name, services in list(zip(TIMES, groups, strict=True))[:: 1 if turn % 2 else -1]:
                start = time.perf_counter()
                await asyncio.gather(
                    *(services.rollout.explore(request, cond) for request, cond in work)
                )
                if turn:  # the first turn warms up
                    times[name].append(time.perf_counter() - start)
        return times
    finally:
        for services in groups:
            await services.stop()


async def _tasks(services: ActorServices) -> list[tuple[ExploreChunk, Any]]:
    """Return the tasks of iteration 0, with object references to their conditioning."""
    config = services.config
    plan, size = config.plan.explore, config.explore.chunk_size
    assert plan is not None
    prompts = read_prompts(config.prompts.train)
    rows = prompts_of_iteration(len(prompts), config.prompts.per_iteration, 0, config.seed)
    conditioning = await services.encoder.encode(0, [[prompts[row]] for row in rows])
    tasks = []
    for p, cond in enumerate(conditioning):
        seeds = tuple(stream_seed(config.seed, "explore", 0, p, n) for n in range(plan.pool_size))
        for number, first in enumerate(range(0, len(seeds), size)):
            key, part = ChunkKey(0, p, number, 0), seeds[first : first + size]
            tasks.append((ExploreChunk(key, part, plan.steps, plan.solver, False), cond))
    return tasks
