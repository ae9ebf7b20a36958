"""The learner service: regenerates in full precision, updates the LoRA, exports the policy for the
explorers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from actors.messages import Rows, TrainingGroup
from actors.runtime import begin, identity
from learner.objectives import Record
from learner.replicas import DistributedReplicas, open_store, reach_store
from policy.types import Conditioning


class LearnerActor:
    """A thin shell around ``learner.trainer.Trainer``."""

    def __init__(self, config: dict[str, Any], failure_dir: str):
        run, _, device = begin(config, "learner")
        from learner.trainer import (
            Trainer,
        )  # with it peft and diffusers: seconds, which the driver need not spend

        self._trainer = Trainer(run, device=device, failure_dir=failure_dir)
        self._chunks: list[np.ndarray] = []
        self._store: Any = None

    def ready(self) -> dict[str, Any]:
        """Who this is, how many parameters it trains, and whether its first pictures will take
        longer.
        """
        return identity(
            trainable=self._trainer.trainable_parameters,
            cold=self._trainer.config.regenerate.compile,
        )

    def meeting_place(self, timeout_s: float) -> tuple[str, int]:
        """(host, port) where the replicas of this learner meet, on this node's own address; open
        until they meet again.
        """
        self._store, port = open_store(host := ray.util.get_node_ip_address(), timeout_s)
        return host, port

    def join(self, rank: int, size: int, host: str, port: int, timeout_s: float) -> None:
        """Become replica ``rank`` of ``size``. Returns when all are there and hold the same
        weights.

        A replica that keeps the others waiting for ``timeout_s``, now or later, counts as lost:
        GroupBroken.
        """
        store = self._store if rank == 0 else reach_store(host, port, timeout_s)
        self._trainer.join(DistributedReplicas(rank, size, store, self._trainer.device, timeout_s))

    def quantisation(self) -> list[dict[str, Any]]:
        """The table of modules: what explorers run quantised and what not, and why."""
        return self._trainer.quantisation_table

    def generate(
        self,
        conditioning: Conditioning,
        seeds: tuple[int, ...],
        steps: int,
        solver: str | None,
        weights: str | None,
    ) -> tuple[float, np.ndarray, Record]:
        """(seconds, images uint8 [B, 3, H, W], samples as named arrays [B, ...]) in full precision.

        Row r of ``conditioning`` serves an equal share of the seeds, in order: all of them when
        there is one row. ``weights`` is current, old, ema or base; None is the sampling policy of
        the objective, as None is its solver.
        """
        start = time.perf_counter()
        rows = conditioning.repeat(len(seeds) // len(conditioning))
        samples, images = self._trainer.regenerate(
            rows, seeds, steps=steps, solver=solver, weights=weights
        )
        return time.perf_counter() - start, images, samples

    def update(
        self, iteration: int, groups: list[TrainingGroup], conds: int, *sent: Any
    ) -> dict[str, float]:
        """One training iteration. ``sent``: first ``conds`` Conditionings, one per group, then the
        records of samples.

        Groups without samples are other replicas' to train on; their rewards count here too.
        """
        from learner.trainer import Group

        mine, conditionings, records = (
            [group for group in groups if group.samples],
            sent[:conds],
            sent[conds:],
        )
        batch = [
            Group(
                prompt_index=group.prompt,
                cond=conditioning,
                samples=gather(group.samples, records),
                rewards=group.rewards,
            )
            for group, conditioning in zip(mine, conditionings, strict=True)
        ]
        return self._trainer.update(
            iteration, batch, {group.prompt: group.rewards for group in groups if not group.samples}
        )

    def export(
        self, version: int, backend: str | None = None, weights: str | None = None
    ) -> tuple[Any, dict[str, float]]:
        """Pack the sampling policy; (manifest, statistics against the version before). Chunks are
        then fetched one by one.

        ``backend`` is the precision that explorers run; None: what the configuration says.
        ``weights``: another adapter.
        """
        manifest, self._chunks, statistics = self._trainer.export(version, backend, weights)
        return manifest, statistics

    def chunk_by_reference(self, index: int) -> tuple[int, np.ndarray]:
        """(bytes, one chunk uint8 of the last export). A return value is owned by the caller: it
        outlives this actor.
        """
        return self._chunks[index].nbytes, self._chunks[index]

    def save(self, path: str, extra: dict[str, Any]) -> None:
        """Write a checkpoint directory atomically."""
        self._trainer.save(path, extra)

    def load(self, path: str) -> dict[str, Any]:
        """Restore a checkpoint; returns the extra state it was saved with."""
        return self._trainer.load(path)


def gather(parts: Sequence[Rows], records: Sequence[Record]) -> Record:
    """The samples that ``parts`` name, in their order, as one record."""
    names = records[parts[0].record]
    return {
        name: np.concatenate([records[part.record][name][list(part.rows)] for part in parts])
        for name in names
    }
