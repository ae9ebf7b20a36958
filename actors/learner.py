"""The learner service: regenerates at full precision, updates the LoRA and exports the policy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import ray
from ray import ObjectRef

from actors.messages import (
    ActorInfo,
    AllRewards,
    Exported,
    Floats,
    GenerateRequest,
    Images,
    Moved,
    Portion,
    Probe,
    ProbeResult,
    Rendezvous,
    SampleRows,
    Samples,
    Shard,
    UpdateRequest,
)
from actors.runtime import identity, load_config, on_device, setup_torch
from actors.turns import Turn
from configs.section import Tree
from learner.replicas import DistributedReplicas, open_store, reach_store
from policy.device import threads
from policy.types import Conditioning
from records.shared import require_shared

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from learner.batch import Group

X = TypeVar("X")


class Fetch(Protocol):
    """Function that returns the objects of references, in order."""

    def __call__(self, references: Sequence[ObjectRef[X]], /) -> list[X]: ...


@on_device(
    "learner",
    "optimizer.batch_size and regenerate.batch_size, set optimizer.gradient_checkpointing = true",
)
class LearnerActor:
    """Actor around ``learner.trainer.Trainer``; one replica of the learner."""

    def __init__(self, tree: Tree, run_directory: str, fetch: Fetch = ray.get):
        """``fetch`` resolves references; the default is Ray's own function."""
        run, self._run_directory = load_config(tree), Path(run_directory)
        device = setup_torch(run, "learner")
        # it imports peft and diffusers, which takes seconds; the driver needs only method names
        from learner.trainer import Trainer

        shard = run.services.learner.shard == "base"
        leaves = run.services.learner.between_turns == "host"
        failure_dir = self._run_directory / "failure"
        self._trainer = Trainer(
            run, device=device, failure_dir=failure_dir, shard=shard, offload=leaves
        )
        self._turn = Turn("the learner", run.services, device)
        self._service = run.services.learner
        self._fetch = fetch
        self._shards: list[Shard] = []
        self._store: TCPStore | None = None

    def ready(self) -> ActorInfo:
        """Describe the actor, with the number of trained parameters.

        Raises ConfigError if this node cannot write to the run directory: the first checkpoint may
        be hours away.
        """
        require_shared(self._run_directory)
        trainer = self._trainer
        cold = trainer.config.learner_compile_key is not None
        return replace(
            identity(trainer.device),
            trainable=trainer.trainable_parameters,
            left_out=trainer.left_out or None,
            cold=cold,
        )

    def begin_turn(self) -> Moved:
        """Bring the weights back to the GPU."""
        return self._turn.begin(self._trainer.offload)

    def end_turn(self) -> Moved:
        """Leave the GPU to the rollout actors.

        Calls that need no frozen weights still work: checkpoints, and shards of the last export.
        """
        return self._turn.end(self._trainer.offload)

    def rendezvous(self, timeout_s: float) -> Rendezvous:
        """Open the store through which the replicas connect; return its address."""
        host = ray.util.get_node_ip_address()
        self._store, port = open_store(host, timeout_s)
        return Rendezvous(host, port, timeout_s)

    def join(self, rank: int, size: int, at: Rendezvous) -> None:
        """Become replica ``rank`` of ``size``; return when all replicas have the same weights.

        Raises:
            GroupBroken: another replica did not join within ``at.timeout_s`` seconds.
        """
        store = self._store if rank == 0 else reach_store(at.host, at.port, at.timeout_s)
        assert store is not None, "the first replica must return its rendezvous before it joins"
        device = self._trainer.device
        self._trainer.join(DistributedReplicas(rank, size, store, device, at.timeout_s))

    def quantization(self) -> list[dict[str, object]]:
        """Return the rows of ``quantization.json``: which modules are quantized, with reasons."""
        return self._trainer.exporter.table

    def generate(
        self, request: GenerateRequest, conditioning: Conditioning
    ) -> tuple[float, Images, Samples]:
        """Generate at full precision; return (seconds, images, samples [B, ...])."""
        self._turn.require("generate")
        start = time.perf_counter()
        rows = conditioning.repeat(len(request.seeds) // len(conditioning))
        # training samples are regenerated while rollout actors explore, so only with the threads
        # that ``regenerate_threads`` allows: more would compete with theirs for cores
        service = self._service
        with threads(service.regeneration_threads if request.weights is None else service.threads):
            samples, images = self._trainer.generator.generate(
                rows,
                request.seeds,
                request.steps,
                request.weights,
                request.solver,
                guidance=request.guidance,
                start=request.start,
            )
        return time.perf_counter() - start, images, samples

    def stand_by(self, request: GenerateRequest) -> None:
        """Take part in the passes of other replicas that generate a request like ``request``.

        If the base is sharded, every pass needs all replicas.
        """
        self._trainer.generator.stand_by(request.weights, request.solver)

    def update(self, request: UpdateRequest, all_rewards: AllRewards) -> dict[str, float]:
        """Train for one iteration on this replica's portions; return metrics by name.

        Ray does not resolve references inside a message, so the method fetches their objects, and
        raises ObjectLostError if these were lost with a node.
        """
        self._turn.require("update")
        rewards = all_rewards.by_prompt()
        groups = self._batch(request.portions, rewards)
        mine = {portion.prompt for portion in request.portions}
        elsewhere = {prompt: row for prompt, row in rewards.items() if prompt not in mine}
        return self._trainer.update(request.iteration, groups, elsewhere)

    def _batch(self, portions: Sequence[Portion], rewards: Mapping[int, Floats]) -> list[Group]:
        from learner.batch import Group

        conditionings = self._fetch([portion.conditioning for portion in portions])
        samples = iter(self._fetch([part.samples for one in portions for part in one.samples]))
        return [
            Group(
                prompt_index=portion.prompt,
                cond=conditioning,
                samples=gather(portion.samples, [next(samples) for _ in portion.samples]),
                rewards=rewards[portion.prompt],
                rows=portion.rows,
            )
            for portion, conditioning in zip(portions, conditionings, strict=True)
        ]

    def export(
        self, version: int, backend: str | None = None, weights: str | None = None
    ) -> Exported:
        """Pack the sampling policy; its shards are then fetched one by one.

        ``backend`` is the precision that rollout actors use, None the configured one. ``weights``
        names another adapter to pack. If the base is sharded, all replicas must be called, because
        each has some rows of every weight; the first one keeps the packed shards.
        """
        self._turn.require("export")
        manifest, shards, statistics = self._trainer.export(version, backend, weights)
        self._shards = shards if self._trainer.replicas.rank == 0 else []
        return Exported(manifest, statistics)

    def shard(self, index: int) -> tuple[int, Shard]:
        """Return (number of bytes, one shard uint8 [bytes] of the last export)."""
        return self._shards[index].nbytes, self._shards[index]

    def probe(self, request: Probe, conditioning: Conditioning) -> ProbeResult:
        """Generate a few seeds with the weights of the last export, to compare rollout actors."""
        self._turn.require("probe")
        return ProbeResult(
            *self._trainer.exporter.probe(
                conditioning, request.version, request.seeds, request.steps, request.solver
            )
        )

    def save(self, path: str, extra: Mapping[str, object]) -> None:
        """Write a checkpoint directory atomically."""
        self._trainer.save(path, dict(extra))

    def load(self, path: str) -> Mapping[str, object]:
        """Restore a checkpoint; return the extra state that was saved with it."""
        return self._trainer.load(path)


def gather(parts: Sequence[SampleRows], fetched: Sequence[Samples]) -> Samples:
    """Concatenate the rows of each part, taken from the samples fetched for that part."""
    return {
        name: np.concatenate(
            [samples[name][list(part.rows)] for part, samples in zip(parts, fetched, strict=True)]
        )
        for name in fetched[0]
    }
