"""Durations of calls to actors, on their own or sharing a GPU or cores: the input of a simulation.

They are computed from operations and peaks (``of_tasks``), or estimated from the timeline of a run
(``planning.calibration``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from configs.schema import RunConfig
from planning.counting import Counts
from planning.gathering import NOTHING, Gathering
from planning.layouts.predict import Tasks

LINK = 25e9
"""Bytes per second between two nodes: 200 Gb/s."""
LOAD = 4e9
"""Bytes per second from an object store into an actor's GPU: verified and copied, one after the
other at 10 and 8 GB/s. Not measured in this form; 3 GB/s on an H200 with one more copy in between.
"""
PACK = 3e9
"""Bytes per second of publishing: packed on the GPU, copied to the host, hashed, and put into the
object store, one after the other at 100, 8, 10 and 10 GB/s of packed bytes. Not measured in this
form; packed by single operations of torch and copied twice, FLUX.1 reached 0.34 GB/s on an H200.
"""
HOP_S = 2e-5
"""Latency in seconds of one step of a ring all-reduce over nodes."""
CALL_S = 1e-3
"""Seconds that a call and its answer need between driver and actor, both ways together."""
DRIVER_S = 5e-4
"""Seconds of the driver per call; it handles one at a time (``python -m bench driver``)."""


@dataclass(frozen=True)
class Line:
    """Seconds as a linear function of the size of a call: ``fixed`` plus ``each`` per item."""

    fixed: float = 0.0
    each: float = 0.0

    def at(self, count: float) -> float:
        """Return the seconds for ``count`` items."""
        return max(0.0, self.fixed + self.each * count)


@dataclass(frozen=True)
class Summing:
    """Ring all-reduce of the replicas' gradients in every optimizer step.

    ``whole_s`` is the time in which a link carries the gradients of one replica.
    """

    steps: int = 1
    whole_s: float = 0.0
    hop_s: float = HOP_S

    def at(self, size: int) -> float:
        """Return the seconds of all reductions in an iteration with ``size`` replicas."""
        if size < 2:
            return 0.0
        return self.steps * 2 * (size - 1) * (self.whole_s / size + self.hop_s)


@dataclass(frozen=True)
class Durations:
    """Seconds of each kind of call.

    ``explore``, ``generate`` and ``score`` (by service) are linear in images, ``update`` in the
    samples of one replica, ``encode`` and ``select`` in prompts. ``move``, by service, is the time
    in which an actor's weights leave its GPU, or return. ``gathering`` is added to the calls of a
    learner whose base is sharded. ``call_s`` (in transit) and ``driver_s`` (in the driver) are
    added to every call.
    """

    explore: Line
    generate: Line
    update: Line
    score: Mapping[str, Line] = field(default_factory=dict[str, Line])
    encode: Line = Line()
    select: Line = Line()
    export: Line = Line()
    shard: Line = Line()
    load: Line = Line()
    summing: Summing = Summing()
    gathering: Gathering = NOTHING
    move: Mapping[str, float] = field(default_factory=dict[str, float])
    call_s: float = CALL_S
    driver_s: float = DRIVER_S


def of_tasks(config: RunConfig, tasks: Tasks, counts: Counts, nodes: int) -> Durations:
    """Return the durations on one kind of GPU from ``tasks``, an iteration's seconds on it.

    ``nodes`` is the number of nodes of the run.
    """
    plan, keep = config.plan, config.selection.keep
    pool = plan.explore.pool_size if plan.explore else 0
    per_prompt = keep + config.audit.random_seeds if plan.regenerate else 0
    images = tasks.prompts * (pool + per_prompt)
    sent = counts.changing if plan.explore else 0
    return Durations(
        explore=Line(0.0, tasks.chunks * tasks.chunk / max(1, tasks.prompts * pool)),
        generate=Line(0.0, tasks.regenerate / max(1, per_prompt)),
        update=Line(0.0, tasks.update / keep),
        score={kind: Line(0.0, seconds / images) for kind, seconds in tasks.score.items()},
        encode=Line(0.0, tasks.encode / tasks.prompts),
        export=Line(sent / PACK),
        load=Line(fetching(sent, nodes) + sent / LOAD),
        move={
            kind: seconds
            for kind, seconds in tasks.move.items()
            if getattr(config.services, kind).between_turns == "host"
        },
        summing=Summing(config.optimizer.steps_per_iteration, counts.trained * 4 / LINK),
        gathering=tasks.gathering,
    )


def as_measured(config: RunConfig, counted: Tasks, calls: Durations) -> Tasks:
    """Return ``counted`` with the durations of ``calls``, as measured in a run, in their place."""
    explore, size, plan = config.plan.explore, config.explore.chunk_size, config.plan
    pool = explore.pool_size if explore else 0
    chunks = [min(size, pool - first) for first in range(0, pool, size)]
    regenerated = config.selection.keep + config.audit.random_seeds if plan.regenerate else 0
    batches = [*chunks, *([regenerated] if regenerated else [])]
    return replace(
        counted,
        chunk=sum(map(calls.explore.at, chunks)) / max(1, len(chunks)),
        regenerate=calls.generate.at(regenerated) if regenerated else 0.0,
        update=calls.update.at(counted.prompts * config.selection.keep) / counted.prompts,
        score={
            kind: counted.prompts * sum(map(calls.score[kind].at, batches))
            if kind in calls.score
            else seconds
            for kind, seconds in counted.score.items()
        },
        encode=calls.encode.at(counted.prompts),
        move={**counted.move, **calls.move},
    )


def fetching(sent: int, nodes: int) -> float:
    """Return the seconds to copy ``sent`` bytes from one node to all; nodes that have them forward.

    The number of nodes that have them doubles in each step.
    """
    return sent / LINK * math.ceil(math.log2(nodes)) if nodes > 1 else 0.0


def speed(requested: float, capacity: float, together: float) -> float:
    """Return the speed of each job that shares a resource, relative to running alone.

    ``requested`` is the total demand of all jobs, ``capacity`` 1 for a GPU, else the number of
    cores. ``together`` is the speed of a core while all are busy, relative to one that is busy
    alone; in between, the speed falls linearly with the number of busy cores.
    """
    if requested <= 1.0:
        return 1.0
    slower = 1.0
    if capacity > 1.0:
        slower -= (1.0 - together) * (min(requested, capacity) - 1.0) / (capacity - 1.0)
    return slower * min(1.0, capacity / requested)
