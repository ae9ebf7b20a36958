"""What each call to an actor takes on its GPU or cores, alone or shared: what a simulation runs on.

From operations and peaks (``of_tasks``), or from the timeline of a run (``planning.calibration``).
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
HOST = 10e9
"""Bytes per second from an object store into an actor, and from a GPU to the host."""
PACK = 4e9
"""Bytes per second of what is published: from the GPU to the host, hashed, and into the object
store, at 25, 10 and 10 GB/s one after the other.
"""
HOP_S = 2e-5
"""Seconds of one step of a sum over nodes."""
CALL_S = 1e-3
"""Seconds between driver and actor, both ways."""
DRIVER_S = 5e-4
"""Seconds of the driver for each call; it does one after the other (``python -m bench driver``)."""


@dataclass(frozen=True)
class Line:
    """Seconds as a straight line over how much there is to do."""

    fixed: float = 0.0
    each: float = 0.0

    def at(self, count: float) -> float:
        """Seconds for ``count``."""
        return max(0.0, self.fixed + self.each * count)


@dataclass(frozen=True)
class Summing:
    """Replicas add up gradients in every step of the optimizer, in a ring; ``whole_s`` is what the
    gradients of one take over a link.
    """

    steps: int = 1
    whole_s: float = 0.0
    hop_s: float = HOP_S

    def at(self, size: int) -> float:
        """Seconds of an iteration with ``size`` replicas."""
        if size < 2:
            return 0.0
        return self.steps * 2 * (size - 1) * (self.whole_s / size + self.hop_s)


@dataclass(frozen=True)
class Durations:
    """Seconds of calls. ``explore``, ``generate`` and ``score`` (by service) are over images,
    ``update`` over the samples of one replica, ``encode`` and ``select`` over prompts.

    ``move``: an actor of this service leaves its GPU, or comes back. ``gathering`` is added to what
    a learner does where its base is in shards. ``call_s`` (on the way) and ``driver_s`` (in the
    driver) are added to every call.
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
    """Durations on one kind of GPU, where ``tasks`` are an iteration's seconds on it, and the nodes
    of the run are ``nodes``.
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
        load=Line(fetching(sent, nodes) + sent / HOST),
        move={
            kind: seconds
            for kind, seconds in tasks.move.items()
            if getattr(config.services, kind).between_turns == "host"
        },
        summing=Summing(config.optimizer.steps_per_iteration, counts.trained * 4 / LINK),
        gathering=tasks.gathering,
    )


def as_measured(config: RunConfig, counted: Tasks, calls: Durations) -> Tasks:
    """An iteration as ``counted``, with what ``calls`` took in a run in the place of what is
    counted of them.
    """
    explore, size, plan = config.plan.explore, config.explore.chunk_size, config.plan
    pool = explore.pool_size if explore else 0
    chunks = [min(size, pool - first) for first in range(0, pool, size)]
    again = config.selection.keep + config.audit.random_seeds if plan.regenerate else 0
    batches = [*chunks, *([again] if again else [])]
    return replace(
        counted,
        chunk=sum(map(calls.explore.at, chunks)) / max(1, len(chunks)),
        regenerate=calls.generate.at(again) if again else 0.0,
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
    """Seconds until all nodes have what one has: those that have it pass it on."""
    return sent / LINK * math.ceil(math.log2(nodes)) if nodes > 1 else 0.0


def speed(wanted: float, capacity: float, together: float) -> float:
    """The speed of each user compared with being alone, where all together want ``wanted`` of a
    ``capacity``: 1 for a GPU, or so many cores. ``together``: the speed of a core while all cores
    are busy.
    """
    if wanted <= 1.0:
        return 1.0
    slower = 1.0
    if capacity > 1.0:
        slower -= (1.0 - together) * (min(wanted, capacity) - 1.0) / (capacity - 1.0)
    return slower * min(1.0, capacity / wanted)
