"""Benchmark of the ring with one rollout actor, relative to the same work in a single process.

Both run the same iterations alternately, and the benchmark raises an error unless both have
bit-identical policies after each. The ring may overlap the work of its actors if there are enough
cores; the ratio of CPU seconds shows its cost independent of that.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.single_process import SingleProcessLoop
from bench.timing import Options, Ratio, ray_for, silent
from cluster.driver.loop import Ring
from cluster.driver.services import ActorServices
from configs.load import parse
from configs.prompts import Prompt, read_prompts
from configs.schema import RunConfig
from records.rundir import RunDirectory

GOAL = 0.96


class NullProgress:
    """A progress display without output."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: None


def measure(options: Options) -> list[Ratio]:
    """Return wall and CPU time of the ring's iterations relative to the plain process.

    Raises RuntimeError if their results differ.
    """
    config = one_rollout_actor(options.config)
    with ray_for(config), tempfile.TemporaryDirectory(prefix="sol-rl-bench-") as scratch:
        wall, cpu = asyncio.run(_alternate(config, options.repeats, Path(scratch)))
    threads = f"threads: {config.services.learner.threads} per process; results bit-identical"
    return [
        Ratio.of(wall, "ring", "plain process", GOAL, threads),
        Ratio.of(cpu, "ring (CPU time)", "plain process (CPU time)"),
    ]


def one_rollout_actor(config: RunConfig) -> RunConfig:
    """Return the configuration with one rollout actor, equal threads everywhere, and no audit."""
    tree = config.model_dump(mode="json")
    threads = tree["services"]["learner"]["threads"]
    for kind in ("rollout", "reward", "encoder", "selector", "learner"):
        tree["services"][kind]["threads"] = threads
    tree["services"]["rollout"]["actors"] = 1
    tree["audit"]["random_seeds"] = 0
    return parse(tree | {"name": f"{config.name[:80]}-bench-ring"})


def quiet_ring(config: RunConfig, scratch: Path) -> tuple[Ring, list[Prompt]]:
    """Return a ring without output, whose services are not yet started, and its prompts."""
    prompts, rundir = read_prompts(config.prompts.train), RunDirectory(scratch)
    rundir.create(config)
    services = ActorServices(config, rundir, silent)
    quiet: Any = NullProgress()
    return Ring(config, services, prompts, quiet, silent), prompts


async def _alternate(
    config: RunConfig, repeats: int, scratch: Path
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    ring, prompts = quiet_ring(config, scratch)
    services = ring.services
    wall: dict[str, list[float]] = {"ring": [], "plain process": []}
    cpu: dict[str, list[float]] = {"ring (CPU time)": [], "plain process (CPU time)": []}
    await services.start()
    threads = torch.get_num_threads()
    try:
        await ring.publish(0)
        plain = SingleProcessLoop(config, prompts, str(scratch))
        for index in range(repeats + 1):
            before, start = _cpu_seconds(), time.perf_counter()
            await ring.iteration(index)
            ring_wall, ring_cpu = time.perf_counter() - start, _since(before)
            before, start = time.process_time(), time.perf_counter()
            plain.iteration(index)
            plain_wall, plain_cpu = time.perf_counter() - start, time.process_time() - before
            _require_same(services, plain, index)
            if index:  # the first iteration warms up
                for table, values in (
                    (wall, (ring_wall, plain_wall)),
                    (cpu, (ring_cpu, plain_cpu)),
                ):
                    for name, value in zip(table, values, strict=True):
                        table[name].append(value)
    finally:
        await services.stop()
        torch.set_num_threads(threads)
    return wall, cpu


def _require_same(services: ActorServices, plain: SingleProcessLoop, index: int) -> None:
    published = services.weights.current
    assert published is not None
    if published.manifest.checksum != plain.checksum:
        raise RuntimeError(
            f"after iteration {index} the ring's policy has checksum {published.manifest.checksum},"
            f" the plain loop's {plain.checksum}: they did not do the same work, so their times"
            " cannot be compared"
        )


def _cpu_seconds() -> dict[int, float]:
    """Return the CPU seconds so far of this process and its descendants, by process id."""
    seconds = {}
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it ended meanwhile
            continue
        seconds[process.pid] = times.user + times.system
    return seconds


def _since(before: dict[int, float]) -> float:
    return sum(now - before.get(pid, 0.0) for pid, now in _cpu_seconds().items())
