"""The learner service: regenerates in full precision, updates the LoRA, exports the policy for the
rollout actors.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import ray
from ray import ObjectRef

from actors.messages import (
    ActorInfo,
    Exported,
    Floats,
    GenerateRequest,
    Images,
    Probe,
    Probed,
    Rendezvous,
    SampleRows,
    Samples,
    Shard,
    TrainingGroup,
)
from actors.runtime import Tree, begin, begin_torch, identity, on_device
from configs.services import Share
from learner.replicas import DistributedReplicas, open_store, reach_store
from policy.types import Conditioning

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from learner.batch import Group

X = TypeVar("X")


class Fetch(Protocol):
    """The objects behind references, in order."""

    def __call__(self, references: Sequence[ObjectRef[X]], /) -> list[X]: ...


@on_device(
    "learner",
    "optimizer.batch_size and regenerate.batch_size, set optimizer.gradient_checkpointing = true",
)
class LearnerActor:
    """A thin shell around ``learner.trainer.Trainer``."""

    def __init__(self, tree: Tree, failure_dir: str, fetch: Fetch = ray.get):
        """``fetch`` is another one where there is no Ray."""
        run, _ = begin(tree, "learner")
        device = begin_torch(run, "learner")
        # with it come peft and diffusers: seconds, which the driver need not spend
        from learner.trainer import Trainer

        self._trainer = Trainer(run, device=device, failure_dir=failure_dir)
        self._fetch = fetch
        self._shards: list[Shard] = []
        self._store: TCPStore | None = None

    def ready(self) -> ActorInfo:
        """Who this is, and how many parameters it trains."""
        trainer = self._trainer
        cold = trainer.config.regenerate.compile
        return replace(identity(trainer.device), trainable=trainer.trainable_parameters, cold=cold)

    def rendezvous(self, timeout_s: float) -> Rendezvous:
        """Where the replicas of this learner can find each other, open until they do so again."""
        host = ray.util.get_node_ip_address()
        self._store, port = open_store(host, timeout_s)
        return Rendezvous(host, port, timeout_s)

    def join(self, rank: int, size: int, at: Rendezvous) -> None:
        """Become replica ``rank`` of ``size``; returns when all hold the same weights.

        Raises:
            GroupBroken: another replica kept the others waiting for longer than ``at.timeout_s``.
        """
        store = self._store if rank == 0 else reach_store(at.host, at.port, at.timeout_s)
        assert store is not None, "the first replica is asked for its rendezvous before it joins"
        device = self._trainer.device
        self._trainer.join(DistributedReplicas(rank, size, store, device, at.timeout_s))

    def quantisation(self) -> list[dict[str, object]]:
        """Rows of ``quantisation.json``: what explorers run quantised and what not, and why."""
        return self._trainer.quantisation_table

    def generate(
        self, request: GenerateRequest, conditioning: Conditioning
    ) -> tuple[float, Images, Samples]:
        """(seconds, images uint8 [B, 3, H, W], samples [B, ...]) in full precision."""
        start = time.perf_counter()
        rows = conditioning.repeat(len(request.seeds) // len(conditioning))
        samples, images = self._trainer.regenerate(rows, **asdict(request))
        return time.perf_counter() - start, images, samples

    def update(self, iteration: int, groups: list[TrainingGroup]) -> dict[str, float]:
        """One training iteration, on this replica's share of ``groups``; returns its metrics.

        Only what this replica trains on is fetched. References within a message are not resolved
        by Ray, so this raises ObjectLostError where their objects went with a node.
        """
        replicas = self._trainer.replicas
        by = self._trainer.config.services.learner.share
        mine, elsewhere = share(groups, replicas.rank, replicas.size, by)
        return self._trainer.update(iteration, self._batch(mine), elsewhere)

    def _batch(self, portions: Sequence[Portion]) -> list[Group]:
        from learner.batch import Group

        conditionings = self._fetch([portion.group.conditioning for portion in portions])
        parts = [portion.samples() for portion in portions]
        fetched = iter(self._fetch([part.samples for mine in parts for part in mine]))
        return [
            Group(
                prompt_index=portion.group.prompt,
                cond=conditioning,
                samples=gather(mine, [next(fetched) for _ in mine]),
                rewards=portion.group.rewards,
                rows=portion.rows,
            )
            for portion, mine, conditioning in zip(portions, parts, conditionings, strict=True)
        ]

    def export(
        self, version: int, backend: str | None = None, weights: str | None = None
    ) -> Exported:
        """Pack the policy that is sampled; its shards are then fetched one by one.

        ``backend`` is the precision that explorers run; None: what the configuration says.
        ``weights``: another adapter.
        """
        manifest, self._shards, statistics = self._trainer.export(version, backend, weights)
        return Exported(manifest, statistics)

    def shard(self, index: int) -> tuple[int, Shard]:
        """(bytes, one shard uint8 [bytes] of the last export)."""
        return self._shards[index].nbytes, self._shards[index]

    def probe(self, request: Probe, conditioning: Conditioning) -> Probed:
        """What the last export makes of a few seeds here, to compare rollout actors with."""
        return Probed(
            *self._trainer.probe(
                conditioning, request.version, request.seeds, request.steps, request.solver
            )
        )

    def save(self, path: str, extra: Mapping[str, object]) -> None:
        """Write a checkpoint directory atomically."""
        self._trainer.save(path, dict(extra))

    def load(self, path: str) -> Mapping[str, object]:
        """Restore a checkpoint; returns the extra state it was saved with."""
        return self._trainer.load(path)


@dataclass(frozen=True)
class Portion:
    """Those of a group's K samples that a replica trains on."""

    group: TrainingGroup
    rows: range  # within 0 .. K

    def samples(self) -> list[SampleRows]:
        """What to fetch of them."""
        found, first = [], 0
        for part in self.group.samples:
            start, stop = (max(0, at - first) for at in (self.rows.start, self.rows.stop))
            if rows := part.rows[start:stop]:
                found.append(SampleRows(part.samples, rows))
            first += len(part.rows)
        return found


def share(
    groups: Sequence[TrainingGroup], rank: int, size: int, by: Share
) -> tuple[list[Portion], dict[int, Floats]]:
    """(what replica ``rank`` trains on, the rewards [K] of all other prompts).

    ``by`` prompts: they go round the replicas. ``by`` samples: of all, prompt after prompt, each
    replica has a run of as many as the others, or one fewer. An advantage may compare a reward with
    those of other prompts, so rewards count everywhere.
    """
    groups = sorted(groups, key=lambda group: group.prompt)
    if by == "prompts":
        rows = {
            group.prompt: range(len(group.rewards))
            for group in groups
            if group.prompt % size == rank
        }
    else:
        rows = _run(groups, rank, size)
    mine = [Portion(group, rows[group.prompt]) for group in groups if group.prompt in rows]
    return mine, {group.prompt: group.rewards for group in groups if group.prompt not in rows}


def _run(groups: Sequence[TrainingGroup], rank: int, size: int) -> dict[int, range]:
    """The rows by prompt of the samples from ``rank`` to ``rank + 1`` of ``size`` equal parts."""
    total = sum(len(group.rewards) for group in groups)
    if total < size:  # said by every replica alike, so that none waits for another
        raise ValueError(
            f"an iteration is left with {total} scored samples, which {size} replicas cannot share"
        )
    begin, end = (total * at // size for at in (rank, rank + 1))
    found, first = {}, 0
    for group in groups:
        count = len(group.rewards)
        if rows := range(max(0, begin - first), min(count, end - first)):
            found[group.prompt] = rows
        first += count
    return found


def gather(parts: Sequence[SampleRows], fetched: Sequence[Samples]) -> Samples:
    """The rows that ``parts`` name, in their order, of the samples that they refer to."""
    return {
        name: np.concatenate(
            [samples[name][list(part.rows)] for part, samples in zip(parts, fetched, strict=True)]
        )
        for name in fetched[0]
    }
