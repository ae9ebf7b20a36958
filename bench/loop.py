"""Benchmark of the ring against single processes that do the same work with the same cores.

One process generates prompt by prompt like the ring; the other generates the images of all prompts
in one batch, as single-process trainers do. The arm is plain DiffusionNFT, which explores nothing,
so that only the encoder, the reward and the learner work. A single process has a thread per core.
So has the ring's learner, and its results are bit-identical; with ``--set
services.learner.replicas=N`` the N replicas share the cores, and results are equal up to the order
of sums.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from bench.ring import one_rollout_actor, quiet_ring
from bench.single_process import SingleProcessLoop
from bench.timing import Options, Ratio, ray_for
from configs.load import parse
from configs.schema import RunConfig
from learner.checkpoint import STATE
from planning.layouts.threads import with_threads
from planning.machine import usable_cores

RING, PLAIN, TOGETHER = "ring", "plain process", "plain process, one batch"
GOAL = 0.8
CLOSE = 1e-3
"""How far the adapter of replicas may be from that of one process after the first update, relative
to the update. Only the order of sums differs, which moves it by 2e-5 with the quickstart's model;
other training times, deals or seeds move it by 0.47 or more.
"""


def measure(options: Options) -> list[Ratio]:
    """Return wall time of iterations, in turns.

    Raises RuntimeError if the ring and the plain loop give different results.
    """
    config = of_plain_arm(options.config)
    with ray_for(config), tempfile.TemporaryDirectory(prefix="sol-rl-bench-") as scratch:
        times = asyncio.run(_alternate(config, options.repeats, Path(scratch)))
    learner, alone = config.services.learner, in_one_process(config).services.learner
    threads = f"threads: {learner.replicas} x {learner.threads}, plain {alone.threads}"
    same = "bit-identical" if learner.replicas == 1 else "equal up to the order of sums"
    return [
        Ratio.of(times, RING, PLAIN, note=f"{threads}; results {same}"),
        Ratio.of(times, RING, TOGETHER, GOAL, threads),
    ]


def of_plain_arm(config: RunConfig) -> RunConfig:
    """Return the configuration as plain DiffusionNFT, whose replicas share the cores."""
    equal = one_rollout_actor(with_threads(config, usable_cores()))
    tree = equal.model_dump(mode="json")
    return parse(tree | {"name": f"{config.name[:80]}-bench-loop", "arm": "diffusionnft"})


def in_one_process(config: RunConfig) -> RunConfig:
    """Return the configuration of a single process, which has the threads of all replicas."""
    tree = config.model_dump(mode="json")
    learner = tree["services"]["learner"]
    threads = learner["replicas"] * learner["threads"]
    learner |= {"replicas": 1, "threads": threads, "regenerate_threads": threads}
    return parse(tree)


async def _alternate(config: RunConfig, repeats: int, scratch: Path) -> dict[str, list[float]]:
    ring, prompts = quiet_ring(config, scratch)
    services, alone = ring.services, in_one_process(config)
    times: dict[str, list[float]] = {RING: [], PLAIN: [], TOGETHER: []}
    await services.start()
    threads = torch.get_num_threads()
    try:
        plain = SingleProcessLoop(alone, prompts, str(scratch))
        together = SingleProcessLoop(alone, prompts, str(scratch), together=True)
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
            if config.services.learner.replicas == 1:
                _require_same(ours, theirs, index)
            elif index == 0:
                _require_close(ours, theirs)
            if index:  # the first iteration warms up
                for name, value in zip(times, seconds, strict=True):
                    times[name].append(value)
    finally:
        await ring.close()
        await services.stop()
        torch.set_num_threads(threads)
    return times


def _require_same(ours: Path, theirs: Path, index: int) -> None:
    """Raise RuntimeError if two checkpoints contain different tensors."""
    first, second = (json.loads((at / STATE).read_text())["files"] for at in (ours, theirs))
    if first != second:
        differ = ", ".join(name for name in first if first[name] != second.get(name))
        raise RuntimeError(
            f"after iteration {index} ring and plain loop differ in {differ}: they did not do the"
            " same work, so their times cannot be compared"
        )


def _require_close(ours: Path, theirs: Path) -> None:
    """Raise RuntimeError if two checkpoints after the first update differ by more than ``CLOSE``.

    The difference is relative to the update itself: B of every LoRA pair starts as zeros.
    """
    first, second = (load_file(at / "adapter.safetensors") for at in (ours, theirs))
    moved = [name for name in first if "lora_B" in name]
    away = sum(float((first[name] - second[name]).square().sum()) for name in moved)
    update = sum(float(second[name].square().sum()) for name in moved)
    if not away <= CLOSE**2 * update:
        raise RuntimeError(
            f"after the first update the replicas' adapter is {(away / update) ** 0.5:.1%} of the"
            " update away from the plain loop's: they did not do the same work, so their times"
            " cannot be compared"
        )
