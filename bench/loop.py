"""Plain DiffusionNFT: the ring against one process with the same cores that does the same, bit for
bit, and against one that draws the images of all prompts as one batch, as single-process trainers
do.

An arm that explores nothing: the encoder, the reward and the learner are all that works. Threads
are those of the configuration, or all cores, for every process.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from pathlib import Path

import torch

from bench.plain import PlainLoop
from bench.ring import one_rollout_actor, quiet_ring
from bench.timing import Options, Ratio, ray_for
from configs.load import parse
from configs.schema import RunConfig
from learner.checkpoint import STATE
from planning.layouts.threads import with_threads

RING, PLAIN, TOGETHER = "ring", "plain process", "plain process, one batch"
GOAL = 0.8


def measure(options: Options) -> list[Ratio]:
    """Wall time of iterations, in turns. Raises RuntimeError where ring and plain loop differ."""
    config = of_plain_arm(options.config)
    with ray_for(config), tempfile.TemporaryDirectory(prefix="sol-rl-bench-") as scratch:
        times = asyncio.run(_alternate(config, options.repeats, Path(scratch)))
    threads = f"threads: {config.services.learner.threads} per process"
    same = f"{threads}; results bit-identical"
    return [Ratio.of(times, RING, PLAIN, note=same), Ratio.of(times, RING, TOGETHER, GOAL, threads)]


def of_plain_arm(config: RunConfig) -> RunConfig:
    """The configuration as plain DiffusionNFT, with equal threads everywhere."""
    equal = one_rollout_actor(with_threads(config, os.cpu_count() or 1))
    tree = equal.model_dump(mode="json")
    return parse(tree | {"name": f"{config.name[:80]}-bench-loop", "arm": "diffusionnft"})


async def _alternate(config: RunConfig, repeats: int, scratch: Path) -> dict[str, list[float]]:
    ring, prompts = quiet_ring(config, scratch)
    services = ring.services
    times: dict[str, list[float]] = {RING: [], PLAIN: [], TOGETHER: []}
    await services.start()
    threads = torch.get_num_threads()
    try:
        plain = PlainLoop(config, prompts, str(scratch / "failure"))
        together = PlainLoop(config, prompts, str(scratch / "failure"), together=True)
        for index in range(repeats + 1):
            start = time.perf_counter()
            await ring.iteration(index)
            seconds = [time.perf_counter() - start]
            for loop in (plain, together):
                start = time.perf_counter()
                loop.iteration(index)
                seconds.append(time.perf_counter() - start)
            ours, theirs = (scratch / f"{who}-{index}" for who in ("ring", "plain"))
            await services.learner.save(index, str(ours), {})
            plain.learner.save(str(theirs), {})
            _require_same(ours, theirs, index)
            if index:  # the first iteration warms up
                for name, value in zip(times, seconds, strict=True):
                    times[name].append(value)
    finally:
        await ring.close()
        await services.stop()
        torch.set_num_threads(threads)
    return times


def _require_same(ours: Path, theirs: Path, index: int) -> None:
    """Raises RuntimeError where two checkpoints hold other tensors."""
    first, second = (json.loads((at / STATE).read_text())["files"] for at in (ours, theirs))
    if first != second:
        differ = ", ".join(name for name in first if first[name] != second.get(name))
        raise RuntimeError(
            f"after iteration {index} ring and plain loop differ in {differ}: they did not do the"
            " same work, so their times cannot be compared"
        )
