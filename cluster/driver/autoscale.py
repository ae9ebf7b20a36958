"""When to grow the rollout pool and when to shrink it: a pure rule on the last iterations.

An iteration is as long as exploring and learning together, less their overlap. While the learner
has nothing in hand it waits: for rollout actors when these are at work, for scoring when they are
not. So the pool grows when the learner waits for much of an iteration and rollout actors work
through most of that wait, and shrinks when they work through little of the iteration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.runtime.pool import ActorPool
from configs.services import Autoscale, Service

CAUSE_SHARE = 0.8
"""Share of the learner's wait that rollout actors must work through, to be its cause."""


@dataclass(frozen=True)
class Load:
    """Shares of one iteration, 0 to 1: the learner idle, and the mean rollout actor busy."""

    learner_waits: float
    rollout_busy: float


def verdict(load: Load, rule: Autoscale) -> int:
    """1: grow, -1: shrink, 0: leave it."""
    if (
        load.learner_waits > rule.grow_above
        and load.rollout_busy >= CAUSE_SHARE * load.learner_waits
    ):
        return 1
    return -1 if load.rollout_busy < rule.shrink_below else 0


def size_for(size: int, loads: Sequence[Load], rule: Autoscale, limits: Service) -> int:
    """The pool's next size, from the loads since it last changed, newest last; ``patience`` of them
    must agree.
    """
    verdicts = {verdict(load, rule) for load in loads[-rule.patience :]}
    if not rule.enabled or len(loads) < rule.patience or len(verdicts) != 1:
        return size
    step = verdicts.pop() * max(1, math.floor(size * rule.step))
    return max(limits.min_actors, min(size + step, limits.max_actors or size))


class Meter:
    """What the pools of a running ring did in one iteration."""

    def __init__(self, pools: Sequence[ActorPool]):
        self._pools = pools
        self._busy_s: dict[str, float] = {}

    def begin(self) -> None:
        """An iteration begins."""
        self._busy_s = {pool.kind: pool.supervisor.busy_s for pool in self._pools}
        for pool in self._pools:
            pool.queue.deepest = len(pool.queue)

    def row(self, seconds: float) -> dict[str, float]:
        """After an iteration of so many seconds: ``busy/<service>``, the share of it that a mean
        actor was busy, 0 to 1, and ``queue/<service>``, the most tasks that waited.
        """
        shares = {
            pool.kind: (
                (pool.supervisor.busy_s - self._busy_s.get(pool.kind, 0.0))
                / (max(seconds, 1e-9) * max(pool.alive, 1))
            )
            for pool in self._pools
        }
        busy = {f"busy/{kind}": min(1.0, share) for kind, share in shares.items()}
        return {**busy, **{f"queue/{pool.kind}": pool.queue.deepest for pool in self._pools}}


class Autoscaler:
    """Remembers the loads since the pool last changed, and applies the rule."""

    def __init__(self, rule: Autoscale, limits: Service):
        self._rule, self._limits = rule, limits
        self._size = 0
        self._loads: list[Load] = []

    def size_after(self, size: int, row: Mapping[str, float | str]) -> int:
        """The size that a pool of ``size`` should have next, after an iteration with ``row`` of
        ``Meter``.
        """
        if size != self._size:
            self._size, self._loads = size, []
        learner, rollout = float(row["busy/learner"]), float(row.get("busy/rollout", 0.0))
        self._loads.append(Load(1 - learner, rollout))
        wanted = size_for(size, self._loads, self._rule, self._limits)
        if wanted != size:
            # what a pool of the old size did says little about one of the new size
            self._loads = []
        return wanted
