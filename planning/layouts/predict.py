"""How long an iteration takes in a layout, by arithmetic: what is counted, laid on the GPUs.

Actors on one GPU take turns at no cost. Where weights leave the GPU between turns, everything is
explored before anything is regenerated, and a change of turns takes as long as the GPU that moves
the most weights. A chunk goes to the rollout actor that would finish it first. Prompts are spread
evenly over the replicas: whole prompts, or samples where replicas share those.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from configs.services import Share
from planning.gathering import NOTHING, Gathering
from planning.layouts.gpus import Gpus, Laid
from planning.layouts.numbers import Numbers
from planning.waiting import NOBODY, Waiting


@dataclass(frozen=True)
class Tasks:
    """An iteration as seconds on one GPU of a kind.

    ``chunk``, ``regenerate`` and ``update`` are seconds of one task: of a chunk, of a prompt, of a
    prompt. ``score`` is of all images, by the service that scores; ``encode`` of all prompts.
    ``move`` is of one actor whose weights leave its GPU, or come back, by service. ``gathering`` of
    a base in shards, and ``waiting`` of replicas for each other, come on top, as they depend on
    how many there are.
    """

    chunks: int
    prompts: int
    chunk: float
    regenerate: float
    update: float
    score: Mapping[str, float] = field(default_factory=dict)
    encode: float = 0.0
    move: Mapping[str, float] = field(default_factory=dict)
    gathering: Gathering = NOTHING
    waiting: Waiting = NOBODY

    def gathered(self, replicas: int, part: float) -> Tasks:
        """With what is gathered by each of so many replicas, which regenerate such a ``part`` of a
        prompt at a time.
        """
        again, trained = self.gathering.of_prompt(replicas, part)
        return replace(self, regenerate=self.regenerate + again, update=self.update + trained)

    @property
    def total(self) -> float:
        """Seconds of a whole iteration on one GPU."""
        of_prompts = self.prompts * (self.regenerate + self.update)
        return self.chunks * self.chunk + of_prompts + sum(self.score.values()) + self.encode


@dataclass(frozen=True)
class Prediction:
    """Seconds, and shares of an iteration. ``rollout``: until all samples to train on are there."""

    iteration: float
    explore: float
    rollout: float
    update: float
    idle: Mapping[str, float]  # of a service's actors
    gpu_idle: Sequence[tuple[int, float, Mapping[str, int]]]  # GPUs, share, who is on each

    @property
    def mean_idle(self) -> float:
        """Idle share of all GPUs together."""
        return sum(n * share for n, share, _ in self.gpu_idle) / sum(n for n, _, _ in self.gpu_idle)


def bound(tasks: Mapping[str, Tasks], gpus: Sequence[Gpus]) -> float:
    """Seconds of an iteration, were all of its work spread evenly over all GPUs."""
    return 1 / sum(each.count / tasks[each.kind].total for each in gpus)


def predict(numbers: Numbers, laid: Sequence[Laid], tasks: Mapping[str, Tasks]) -> Prediction:
    """The prediction for a layout whose actors are ``laid``; ``tasks`` are by kind of GPU."""
    any_tasks, replicas = next(iter(tasks.values())), numbers.groups["learner"].actors
    part_of = part_at_a_time(numbers, any_tasks)
    tasks = {kind: each.gathered(replicas, part_of) for kind, each in tasks.items()}
    parts = _by_prompts(laid, any_tasks.prompts, numbers.share)
    actors = {kind: sum(p.count * p.actors.get(kind, 0) for p in parts) for kind in numbers.groups}
    score = [_scoring(part, tasks[part.kind], actors) for part in parts]
    stage2 = [part.prompts * tasks[part.kind].regenerate for part in parts]
    updates = [part.prompts * tasks[part.kind].update for part in parts]
    longer = any_tasks.waiting.longer(any_tasks.prompts, replicas, numbers.share)
    trained = max(updates) * longer
    # ahead, chunks of the next iteration wait for the updates on their GPU as well
    late = [each * longer if numbers.ahead else 0.0 for each in updates]
    loads = [sum(each) for each in zip(score, stage2, late, strict=True)]
    chunks = [part.actors.get("rollout", 0) * tasks[part.kind].chunk for part in parts]
    slots = [part.count * part.actors.get("rollout", 0) for part in parts]
    explored, _ = fill(list(zip(slots, score, chunks, strict=True)), any_tasks.chunks)
    ended, done = fill(list(zip(slots, loads, chunks, strict=True)), any_tasks.chunks)
    # what is explored last has still to be regenerated, by the quickest GPU at best
    last = [tasks[p.kind].regenerate * part_of for p in parts if p.prompts]
    rollout = max(ended, *loads, explored + (min(last, default=0.0) if any_tasks.chunks else 0.0))
    encode = max((tasks[p.kind].encode for p in parts if "encoder" in p.actors), default=0.0)
    if numbers.leaves:
        change = max(_change(part, tasks[part.kind], numbers.leaves) for part in parts)
        rollout = explored + change + max(stage2)
        iteration = encode + rollout + trained + change
    elif numbers.ahead:
        iteration = max(ended, *loads, explored + encode)
    else:
        iteration = encode + rollout + trained
    busy = [
        sum(each) + count / part.count * tasks[part.kind].chunk
        for part, count, *each in zip(parts, done, score, stage2, updates, strict=True)
    ]
    works = {
        "rollout": sum(n * tasks[p.kind].chunk for p, n in zip(parts, done, strict=True)),
        "learner": sum(p.count * (g + u) for p, g, u in zip(parts, stage2, updates, strict=True)),
        "encoder": encode,
        **any_tasks.score,
    }
    idle = {
        kind: _idle(works[kind] / actors[kind], iteration)
        for kind in numbers.groups
        if kind in works and actors[kind]
    }
    gpus = [
        (p.count, _idle(each, iteration), p.actors) for p, each in zip(parts, busy, strict=True)
    ]
    return Prediction(iteration, explored, rollout, trained, idle, gpus)


def _idle(busy_s: float, whole_s: float) -> float:
    """The share that is left over."""
    return max(0.0, 1 - busy_s / whole_s)


def _change(part: _Part, tasks: Tasks, leaves: Sequence[str]) -> float:
    """Seconds until one side's weights have left a GPU and the other's have come."""
    return sum(part.actors.get(kind, 0) * tasks.move.get(kind, 0.0) for kind in leaves)


def gathered(numbers: Numbers, tasks: Mapping[str, Tasks]) -> dict[str, float]:
    """Seconds of the busiest replica's stages in which it gathers a base in shards; none where it
    is whole.
    """
    any_tasks, replicas = next(iter(tasks.values())), numbers.groups["learner"].actors
    prompts = any_tasks.prompts / replicas
    prompts = math.ceil(prompts) if numbers.share == "prompts" else prompts
    part = part_at_a_time(numbers, any_tasks)
    found = [each.gathering.of_prompt(replicas, part) for each in tasks.values()]
    again, trained = (max(each) for each in zip(*found, strict=True))
    return {"regenerate": prompts * again, "update": prompts * trained} if trained else {}


def part_at_a_time(numbers: Numbers, tasks: Tasks) -> float:
    """Share of a prompt that a learner regenerates at a time."""
    replicas = numbers.groups["learner"].actors
    if numbers.share == "prompts":
        return 1.0
    return math.gcd(tasks.prompts, replicas) / replicas


@dataclass(frozen=True)
class _Part:
    kind: str
    count: int
    actors: Mapping[str, int]
    prompts: float  # of the learners on each


def _by_prompts(laid: Sequence[Laid], prompts: int, shared: Share) -> list[_Part]:
    """GPUs that are alike, also in how many prompts their learners have."""
    learners = sum(each.count * each.actors.get("learner", 0) for each in laid)
    if shared == "samples":
        each_has = prompts / max(1, learners)
        return [
            _Part(each.kind, each.count, each.actors, each.actors.get("learner", 0) * each_has)
            for each in laid
        ]
    share, more = divmod(prompts, max(1, learners))
    parts = []
    for each in laid:
        on_each = each.actors.get("learner", 0)
        first = min(each.count, more // on_each if on_each else 0)
        more -= first * on_each
        parts += [
            _Part(each.kind, count, each.actors, on_each * (share + extra))
            for count, extra in ((first, 1), (each.count - first, 0))
            if count
        ]
    return parts


def _scoring(part: _Part, tasks: Tasks, actors: Mapping[str, int]) -> float:
    """Seconds that the scorers on a GPU work: images are spread evenly over a service's actors."""
    return sum(
        seconds * part.actors.get(kind, 0) / actors[kind]
        for kind, seconds in tasks.score.items()
        if actors.get(kind)
    )


def fill(slots: Sequence[tuple[int, float, float]], tasks: int) -> tuple[float, list[int]]:
    """(when the last of equal tasks ends, tasks of each) where ``slots`` are (how many, busy until,
    seconds of a task) and each task goes to the slot that ends first with it.
    """
    done = [0] * len(slots)
    heap = [(busy + each, i) for i, (count, busy, each) in enumerate(slots) if count]
    heapq.heapify(heap)
    ended = 0.0
    while tasks > 0 and heap:
        ended, i = heapq.heappop(heap)
        taken = min(slots[i][0], tasks)
        done[i] += taken
        tasks -= taken
        heapq.heappush(heap, (ended + slots[i][2], i))
    return ended, done
