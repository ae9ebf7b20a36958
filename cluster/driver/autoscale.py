"""Autoscaling rule of the rollout pool, a pure function of the loads of the last iterations.

An iteration takes as long as exploring and learning together, minus their overlap. While the
learner has no task it waits: for rollout actors if they are busy, for scoring if they are not. So
the pool grows when the learner is idle for much of an iteration and rollout actors are busy during
most of that time, and shrinks when they are busy for only a small part of the iteration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.runtime.pool import ActorPool
from configs.services import Autoscale, Service

CAUSE_SHARE = 0.8
"""Share of the learner's idle time that rollout actors must be busy to count as its cause."""


@dataclass(frozen=True)
class Load:
    """Shares of one iteration, 0 to 1: learner idle time, and mean busy time of rollout actors."""

    learner_waits: float
    rollout_busy: float


def verdict(load: Load, rule: Autoscale) -> int:
    """Return 1 to grow the pool, -1 to shrink it, or 0 to keep its size."""
    if (
        load.learner_waits > rule.grow_above
        and load.rollout_busy >= CAUSE_SHARE * load.learner_waits
    ):
        return 1
    return -1 if load.rollout_busy < rule.shrink_below else 0


def size_for(size: int, loads: Sequence[Load], rule: Autoscale, limits: Service) -> int:
    """Return the pool's next size.

    ``loads`` are those measured since the size last changed, newest last. The size changes only if
    the last ``rule.patience`` of them give the same verdict.
    """
    verdicts = {verdict(load, rule) for load in loads[-rule.patience :]}
    if not rule.enabled or len(loads) < rule.patience or len(verdicts) != 1:
        return size
    step = verdicts.pop() * max(1, math.floor(size * rule.step))
    return max(limits.min_actors, min(size + step, limits.max_actors or size))


class Meter:
    """Measures how busy the pools are during one iteration, and how long their queues become."""

    def __init__(self, pools: Sequence[ActorPool]):
        self._pools = pools
        self._busy_s: dict[str, float] = {}

    def begin(self) -> None:
        """Start measuring an iteration."""
        self._busy_s = {pool.kind: pool.supervisor.busy_s for pool in self._pools}
        for pool in self._pools:
            pool.queue.max_length = len(pool.queue)

    def row(self, seconds: float) -> dict[str, float]:
        """Return the metrics of an iteration that took ``seconds``.

        ``busy/<service>`` is the mean share of the iteration, 0 to 1, that an actor was busy;
        ``queue/<service>`` is the largest number of tasks that waited in the queue.
        """
        shares = {
            pool.kind: (
                (pool.supervisor.busy_s - self._busy_s.get(pool.kind, 0.0))
                / (max(seconds, 1e-9) * max(pool.alive, 1))
            )
            for pool in self._pools
        }
        busy = {f"busy/{kind}": min(1.0, share) for kind, share in shares.items()}
        return {**busy, **{f"queue/{pool.kind}": pool.queue.max_length for pool in self._pools}}


class Autoscaler:
    """Records the loads since the pool size last changed, and applies the rule to them."""

    def __init__(self, rule: Autoscale, limits: Service):
        self._rule, self._limits = rule, limits
        self._size = 0
        self._loads: list[Load] = []

    def size_after(self, size: int, row: Mapping[str, float | str]) -> int:
        """Return the next size for a pool of ``size``, given the ``Meter`` row of an iteration."""
        if size != self._size:
            self._size, self._loads = size, []
        learner, rollout = float(row["busy/learner"]), float(row.get("busy/rollout", 0.0))
        self._loads.append(Load(1 - learner, rollout))
        requested = size_for(size, self._loads, self._rule, self._limits)
        if requested != size:
            # loads of the old size say little about a pool of the new size
            self._loads = []
        return requested
