"""Replicas of a learner in separate processes, for tests that need two. ``python -m
tests.learner.together SIZE PORT MODEL OUT SCENE ...`` runs these scenes (default: all) and prints
the exit codes of the replicas.

The replicas are forks of this process, so that torch and diffusers are imported only once. They
connect to the store of the caller. Each scene writes its results to ``OUT/SCENE.RANK.json`` and the
state of its trainer to ``OUT/SCENE.RANK.safetensors``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import xxhash

from learner.lockstep import OutOfStep
from learner.nonfinite import NonFiniteTraining
from learner.objectives.base import Points
from learner.replicas import (
    DistributedReplicas,
    GroupBroken,
    ReplicaFailed,
    Replicas,
    ReplicasDiffer,
    reach_store,
)
from learner.trainer import Group, Trainer
from policy import sharding
from policy.lora import adapter_state, load_adapter_state
from policy.sampling.noise import stream_seed
from policy.sharding import blocks_of
from tests.learner.tiny import identical, tiny_groups, tiny_trainer, training_state

CPU = torch.device("cpu")
COUNTS = (3, 2, 4)
"""The numbers of samples of the prompts. Two replicas have 7 and 2 samples. In some steps, one of
them has no points or half as many as the other.
"""
OPTIMIZER = {"lr": 1e-4, "steps_per_iteration": 3, "batch_size": 5, "max_grad_norm": 0.02}
EPS = {"diffusion_nft": 2e-4, "flow_grpo": 4e-5}
"""The eps of AdamW: a hundredth of the norm of the gradient, which is 0.04 before clipping, and
0.004.
"""
OBJECTIVES: dict[str, dict[str, Any]] = {
    "diffusion_nft": {"times_per_sample": 3, "kl": 0.1},
    "flow_grpo": {
        "name": "flow_grpo",
        # a wide clip: at the edge of the clip, the last bit would decide about a whole point
        "ratio_clip": 0.5,
    },
}


def stored_base_bytes(transformer: torch.nn.Module) -> int:
    """Return the bytes of the base weights that this process stores, without adapters."""
    base = (p for name, p in transformer.named_parameters() if ".lora_" not in name)
    local = (p if (shard := sharding.sharded(p)) is None else shard.to_local() for p in base)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def trainer_for(
    model: Path, objective: str, failure_dir: Path | None = None, **more: Any
) -> Trainer:
    """Return a tiny trainer whose sampling policy equals the trained policy."""
    trainer = tiny_trainer(
        model,
        failure_dir,
        objective=OBJECTIVES[objective],
        **{"optimizer": {**OPTIMIZER, "eps": EPS[objective]}, **more},
    )
    load_adapter_state(trainer.transformer, "old", adapter_state(trainer.transformer, "current"))
    return trainer


def groups_for(trainer: Trainer, iteration: int, prompts: range) -> list[Group]:
    """Return regenerated samples of some of the three prompts of an iteration. The samples of a
    prompt do not depend on the replica.
    """
    plain = tiny_groups(len(COUNTS), max(COUNTS), seed=iteration)
    groups = []
    for prompt in prompts:
        seeds = [stream_seed(1, "test", iteration, prompt, n) for n in range(COUNTS[prompt])]
        samples = trainer.generator.generate(plain[prompt].cond, seeds)[0]
        groups.append(
            Group(prompt, plain[prompt].cond, samples, plain[prompt].rewards[: COUNTS[prompt]])
        )
    return groups


def train(trainer: Trainer, iterations: int = 2) -> list[dict[str, float]]:
    """Run ``iterations`` updates on the prompts of this replica and return their metrics. A replica
    has every ``size``-th prompt, starting at its rank.
    """
    rank, size = trainer.replicas.rank, trainer.replicas.size
    metrics = []
    for iteration in range(iterations):
        own_groups = groups_for(trainer, iteration, range(rank, len(COUNTS), size))
        if trainer.sharded and len(own_groups) < -(-len(COUNTS) // size):
            trainer.generator.stand_by()  # while other replicas regenerate their last prompt
        plain = tiny_groups(len(COUNTS), max(COUNTS), seed=iteration)
        elsewhere = {
            p: plain[p].rewards[: COUNTS[p]] for p in range(len(COUNTS)) if p % size != rank
        }
        metrics.append(trainer.update(iteration, own_groups, elsewhere))
    return metrics


Outcome = tuple[Trainer, dict[str, Any]]


def run_two_iterations(model: Path, join: Callable[[], Replicas], objective: str) -> Outcome:
    """Run two iterations of complete replicas."""
    trainer = trainer_for(model, objective)
    trainer.join(join())
    results = {"metrics": train(trainer), "checksum": trainer.checksum()}
    return trainer, results | (
        checksums_of_outputs(trainer) if objective == "diffusion_nft" else {}
    )


def sharded(model: Path, join: Callable[[], Replicas], objective: str) -> Outcome:
    """Run two iterations with a sharded base."""
    trainer = trainer_for(model, objective, shard=True)
    stored = [stored_base_bytes(trainer.transformer)]
    trainer.join(join())
    stored.append(stored_base_bytes(trainer.transformer))
    metrics = train(trainer)
    results = {"metrics": metrics, "checksum": trainer.checksum()}
    results |= {"stored_bytes": [*stored, stored_base_bytes(trainer.transformer)]}
    return trainer, results | (
        checksums_of_outputs(trainer) if objective == "diffusion_nft" else {}
    )


def checksums_of_outputs(trainer: Trainer) -> dict[str, Any]:
    """Return checksums of the images that a trained learner generates with each kind of weights
    (twelve on the last replica and three on the others), of the weights that it publishes, and of a
    probe of these.
    """
    last = trainer.replicas.rank == trainer.replicas.size - 1
    cond = tiny_groups(1, 1)[0].cond
    generated = [
        trainer.generator.generate(cond, list(range(12 if last else 3)), 2, weights, "euler")
        for weights in ("old", "ema", "base")
    ]
    manifest, *_ = trainer.export(1, "emulated_nvfp4")
    probed = (
        trainer.exporter.probe(cond, 1, [5], 1, "euler")[0] if not trainer.replicas.rank else None
    )
    return {
        "generated": [digest(samples["latents"]) + digest(images) for samples, images in generated],
        "published": manifest.hashes,
        "probed": None if probed is None else digest(probed),
    }


def digest(values: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(values).data)


def sharded_not_finite(model: Path, join: Callable[[], Replicas]) -> Outcome:
    """The second loss of the last replica is not finite. Afterwards training works again."""
    trainer = trainer_for(model, "diffusion_nft", shard=True)
    trainer.join(replicas := join())
    objective, calls = trainer.objective, []
    original = objective.loss

    def loss(points: Points, *arguments: Any) -> Any:
        result, metrics = original(points, *arguments)
        calls.extend([1] if len(points) > 1 else [])  # only in a turn of this replica
        return result * (np.nan if len(calls) == 2 else 1), metrics

    if replicas.rank == replicas.size - 1:
        objective.__dict__["loss"] = loss
    before = training_state(trainer)
    error = message_of(lambda: train(trainer, 1), NonFiniteTraining)
    objective.__dict__.pop("loss", None)
    unchanged = identical(before, training_state(trainer))
    return trainer, {"error": error, "unchanged": unchanged, "metrics": train(trainer, 1)}


def sharded_dies(model: Path, join: Callable[[], Replicas]) -> Outcome:
    """The last replica is killed within a pass and writes no results."""
    trainer = trainer_for(model, "diffusion_nft", shard=True)
    trainer.join(replicas := join())
    calls: list[int] = []

    def counted(*_: Any) -> None:
        calls.append(1)
        if replicas.rank == replicas.size - 1 and len(calls) > 20:
            os.kill(os.getpid(), signal.SIGKILL)

    list(blocks_of(trainer.transformer))[-1].register_forward_hook(counted)
    before = training_state(trainer)
    error = message_of(lambda: train(trainer, 1), GroupBroken)
    return trainer, {"error": error, "unchanged": identical(before, training_state(trainer))}


def sharded_out_of_step(model: Path, join: Callable[[], Replicas]) -> Outcome:
    """The replicas generate with different weights."""
    trainer = trainer_for(model, "diffusion_nft", shard=True)
    trainer.join(replicas := join())
    weights = ("old", "ema")[replicas.rank]
    return trainer, {"error": message_of(lambda: trainer.generator.stand_by(weights), OutOfStep)}


def not_finite(model: Path, join: Callable[[], Replicas], out: Path) -> Outcome:
    """The samples of the last replica contain a NaN. Afterwards training works again."""
    trainer = trainer_for(model, "diffusion_nft", out)
    trainer.join(replicas := join())
    groups = groups_for(trainer, 0, range(replicas.rank, len(COUNTS), replicas.size))
    if replicas.rank == replicas.size - 1:
        groups[0].samples["latents"][0] = np.nan
    before = training_state(trainer)
    error = message_of(
        lambda: trainer.update(0, groups, {p: groups_rewards(0, p) for p in others(replicas)}),
        NonFiniteTraining,
    )
    return trainer, {
        "error": error,
        "unchanged": identical(before, training_state(trainer)),
        "metrics": train(trainer, 1),
    }


def fails(model: Path, join: Callable[[], Replicas]) -> Outcome:
    """The forward pass of the last replica raises an error in the second step."""
    trainer = trainer_for(model, "diffusion_nft")
    trainer.join(replicas := join())
    if replicas.rank == replicas.size - 1:
        step, calls = trainer.updater._accumulate, []

        def accumulate(*arguments: Any) -> int:
            calls.append(1)
            if len(calls) > 1:
                raise ArithmeticError("out of order")
            return step(*arguments)

        trainer.updater._accumulate = accumulate
    before = training_state(trainer)
    error = message_of(
        lambda: train(trainer, 1),
        ReplicaFailed if replicas.rank < replicas.size - 1 else ArithmeticError,
    )
    return trainer, {"error": error, "unchanged": identical(before, training_state(trainer))}


def differs(model: Path, join: Callable[[], Replicas]) -> Outcome:
    """One bit of one weight of the last replica differs at the start."""
    trainer, replicas = trainer_for(model, "diffusion_nft"), join()
    if replicas.rank == replicas.size - 1:
        parameter = next(iter(trainer.updater.trained.parameters.values())).data
        parameter[0, 0] = torch.nextafter(parameter[0, 0], torch.tensor(9.0))
    return trainer, {"error": message_of(lambda: trainer.join(replicas), ReplicasDiffer)}


def dies(model: Path, join: Callable[[], Replicas]) -> Outcome:
    """The last replica is killed in the second step and writes no results."""
    trainer = trainer_for(model, "diffusion_nft")
    trainer.join(replicas := join())
    step, calls = trainer.updater._accumulate, []

    def accumulate(*arguments: Any) -> int:
        calls.append(1)
        if len(calls) > 1 and replicas.rank == replicas.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*arguments)

    trainer.updater._accumulate = accumulate
    before = training_state(trainer)
    return trainer, {
        "error": message_of(lambda: train(trainer, 1), GroupBroken),
        "unchanged": identical(before, training_state(trainer)),
    }


HALVES: tuple[dict[int, range], dict[int, range]] = (
    {0: range(3), 1: range(1)},
    {1: range(1, 2), 2: range(4)},
)
"""The rows of each prompt for two replicas that share nine samples: four and five, with the second
prompt divided.
"""


def halves(model: Path, join: Callable[[], Replicas]) -> Outcome:
    """Run two iterations in which each replica has a contiguous part of the samples."""
    trainer = trainer_for(model, "diffusion_nft")
    trainer.join(replicas := join())
    rows, metrics = HALVES[replicas.rank], []
    for iteration in range(2):
        groups = groups_for(trainer, iteration, range(len(COUNTS)))
        own_groups = [part_of(groups[prompt], rows[prompt]) for prompt in rows]
        elsewhere = {g.prompt_index: g.rewards for g in groups if g.prompt_index not in rows}
        metrics.append(trainer.update(iteration, own_groups, elsewhere))
    return trainer, {"metrics": metrics, "checksum": trainer.checksum()}


def part_of(group: Group, rows: range) -> Group:
    samples = {name: values[rows.start : rows.stop] for name, values in group.samples.items()}
    return Group(group.prompt_index, group.cond, samples, group.rewards, rows)


def others(replicas: Replicas) -> list[int]:
    return [prompt for prompt in range(len(COUNTS)) if prompt % replicas.size != replicas.rank]


def groups_rewards(iteration: int, prompt: int) -> np.ndarray:
    return tiny_groups(len(COUNTS), max(COUNTS), seed=iteration)[prompt].rewards[: COUNTS[prompt]]


def message_of(work: Callable[[], Any], kind: type[Exception]) -> str:
    """Return the message of the expected exception, or a note that it was not raised."""
    try:
        work()
    except kind as error:
        return str(error)
    return f"no {kind.__name__}"


Scene = Callable[[Callable[[], Replicas]], Outcome]


def scenes_of(model: Path, out: Path) -> dict[str, Scene]:
    """Return the scenes by name. The last one kills a replica."""
    return {
        **{
            name: lambda join, name=name: run_two_iterations(model, join, name)
            for name in OBJECTIVES
        },
        **{
            f"{name}_sharded": lambda join, name=name: sharded(model, join, name)
            for name in OBJECTIVES
        },
        "sharded_not_finite": lambda join: sharded_not_finite(model, join),
        "sharded_out_of_step": lambda join: sharded_out_of_step(model, join),
        "sharded_dies": lambda join: sharded_dies(model, join),
        "halves": lambda join: halves(model, join),
        "not_finite": lambda join: not_finite(model, join, out),
        "fails": lambda join: fails(model, join),
        "differs": lambda join: differs(model, join),
        "dies": lambda join: dies(model, join),
    }


def replica(rank: int, size: int, port: int, model: Path, out: Path, only: tuple[str, ...]) -> None:
    """Run these scenes (default: all)."""
    torch.set_num_threads(1)
    store: dist.TCPStore | None = None

    def connect(scene: str) -> Callable[[], Replicas]:
        assert store is not None
        return partial(DistributedReplicas, rank, size, dist.PrefixStore(scene, store), CPU, 240)

    def run_scene(name: str, scene: Scene) -> None:
        trainer, results = scene(connect(name))
        state = {key: tensor.contiguous() for key, tensor in training_state(trainer).items()}
        (out / f"{name}.{rank}.safetensors").write_bytes(safetensors.torch.save(state))
        (out / f"{name}.{rank}.json").write_text(json.dumps(results))

    scenes = {
        name: scene for name, scene in scenes_of(model, out).items() if not only or name in only
    }
    if last := scenes.pop("sharded_dies", None):
        # forked before connecting to the store, because one of the two will be killed
        child = os.fork()
        if not child:
            # again: each thread would replace the parent's pool, and two at a time can fail
            torch.set_num_threads(1)
            store = reach_store("127.0.0.1", port, 240)
            run_scene("sharded_dies", last)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == (signal.SIGKILL if rank == size - 1 else 0), f"sharded_dies: {status}"
    store = reach_store("127.0.0.1", port, 240)
    for name, scene in scenes.items():
        run_scene(name, scene)


def main(size: int, port: int, model: Path, out: Path, *only: str) -> None:
    trainer_for(model, "diffusion_nft")  # imports all modules before the fork
    context = multiprocessing.get_context("fork")
    replicas = [
        context.Process(target=replica, args=(rank, size, port, model, out, only), daemon=True)
        for rank in range(size)
    ]
    for each in replicas:
        each.start()
    for each in replicas:
        each.join()
    print(*(each.exitcode for each in replicas))


if __name__ == "__main__":
    size, port, model, out, *only = sys.argv[1:]
    main(int(size), int(port), Path(model), Path(out), *only)
