"""Predict the duration of an iteration in a layout analytically, from counted task durations.

Assumptions: actors on one GPU take turns at no cost. If weights leave the GPU between turns, all
exploring precedes all regenerating, and a change of turns takes as long as on the GPU that moves
the most weights. A chunk goes to the rollout actor that would finish it first. Prompts are spread
evenly over the replicas: whole prompts, or samples if replicas share those.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from configs.services import Share
from planning.gathering import NOTHING, Gathering
from planning.layouts.gpus import GpuAssignment, Gpus
from planning.layouts.spec import LayoutSpec
from planning.waiting import NOBODY, Waiting


@dataclass(frozen=True)
class Tasks:
    """Seconds of the tasks of an iteration on one kind of GPU.

    ``chunk`` is for one chunk, ``regenerate`` and ``update`` are for one prompt. ``score``, by
    service, is for all images, ``encode`` for all prompts. ``move``, by service, is the time in
    which the weights of one actor leave its GPU, or return. ``gathering`` of a sharded base, and
    ``waiting`` of replicas for each other, are added later, as they depend on the number of
    replicas.
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
        """Return the tasks with the seconds in which each of ``replicas`` replicas gathers added.

        ``part`` is the share of a prompt that is regenerated per task.
        """
        regenerated, trained = self.gathering.of_prompt(replicas, part)
        return replace(self, regenerate=self.regenerate + regenerated, update=self.update + trained)

    @property
    def total(self) -> float:
        """Seconds of a whole iteration on one GPU."""
        of_prompts = self.prompts * (self.regenerate + self.update)
        return self.chunks * self.chunk + of_prompts + sum(self.score.values()) + self.encode


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds and idle shares of an iteration.

    ``rollout`` is the time until all samples to train on are available.
    """

    iteration: float
    explore: float
    rollout: float
    update: float
    idle: Mapping[str, float]  # mean of a service's actors, by service
    gpu_idle: Sequence[tuple[int, float, Mapping[str, int]]]  # (GPUs, idle share, actors on each)

    @property
    def mean_idle(self) -> float:
        """Mean idle share of all GPUs."""
        return sum(n * share for n, share, _ in self.gpu_idle) / sum(n for n, _, _ in self.gpu_idle)


def bound(tasks: Mapping[str, Tasks], gpus: Sequence[Gpus]) -> float:
    """Return the lower bound of an iteration: its seconds if all work were spread over all GPUs."""
    return 1 / sum(each.count / tasks[each.kind].total for each in gpus)


def predict(
    numbers: LayoutSpec, assigned: Sequence[GpuAssignment], tasks: Mapping[str, Tasks]
) -> Prediction:
    """Predict an iteration in a layout with actors on ``assigned``; ``tasks`` is by kind of GPU."""
    any_tasks, replicas = next(iter(tasks.values())), numbers.groups["learner"].actors
    task_share = part_at_a_time(numbers, any_tasks)
    tasks = {kind: each.gathered(replicas, task_share) for kind, each in tasks.items()}
    parts = _by_prompts(assigned, any_tasks.prompts, numbers.share)
    actors = {kind: sum(p.count * p.actors.get(kind, 0) for p in parts) for kind in numbers.groups}
    score = [_scoring(part, tasks[part.kind], actors) for part in parts]
    regeneration = [part.prompts * tasks[part.kind].regenerate for part in parts]
    updates = [part.prompts * tasks[part.kind].update for part in parts]
    waiting_factor = any_tasks.waiting.longer(any_tasks.prompts, replicas, numbers.share)
    trained = max(updates) * waiting_factor
    # if exploring ahead, chunks of the next iteration also wait for the updates on their GPU
    delayed_by = [each * waiting_factor if numbers.ahead else 0.0 for each in updates]
    loads = [sum(each) for each in zip(score, regeneration, delayed_by, strict=True)]
    chunks = [part.actors.get("rollout", 0) * tasks[part.kind].chunk for part in parts]
    slots = [part.count * part.actors.get("rollout", 0) for part in parts]
    # explored: when exploring ends if only scoring uses the same GPUs; ended: when its last chunk
    # ends if regenerating (and, if exploring ahead, updates) use them too
    explored, _ = fill(list(zip(slots, score, chunks, strict=True)), any_tasks.chunks)
    ended, done = fill(list(zip(slots, loads, chunks, strict=True)), any_tasks.chunks)
    # the prompt that is explored last has still to be regenerated, at best by the fastest GPU
    last = [tasks[p.kind].regenerate * task_share for p in parts if p.prompts]
    rollout = max(ended, *loads, explored + (min(last, default=0.0) if any_tasks.chunks else 0.0))
    encode = max((tasks[p.kind].encode for p in parts if "encoder" in p.actors), default=0.0)
    if numbers.leaves:
        change = max(_change(part, tasks[part.kind], numbers.leaves) for part in parts)
        rollout = explored + change + max(regeneration)
        iteration = encode + rollout + trained + change
    elif numbers.ahead:
        iteration = max(ended, *loads, explored + encode)
    else:
        iteration = encode + rollout + trained
    busy = [
        sum(each) + count / part.count * tasks[part.kind].chunk
        for part, count, *each in zip(parts, done, score, regeneration, updates, strict=True)
    ]
    work_of = {
        "rollout": sum(n * tasks[p.kind].chunk for p, n in zip(parts, done, strict=True)),
        "learner": sum(
            p.count * (g + u) for p, g, u in zip(parts, regeneration, updates, strict=True)
        ),
        "encoder": encode,
        **any_tasks.score,
    }
    idle = {
        kind: _idle(work_of[kind] / actors[kind], iteration)
        for kind in numbers.groups
        if kind in work_of and actors[kind]
    }
    gpus = [
        (p.count, _idle(each, iteration), p.actors) for p, each in zip(parts, busy, strict=True)
    ]
    return Prediction(iteration, explored, rollout, trained, idle, gpus)


def _idle(busy_s: float, whole_s: float) -> float:
    """Return the idle share of ``whole_s`` seconds of which ``busy_s`` are busy."""
    return max(0.0, 1 - busy_s / whole_s)


def _change(part: _Part, tasks: Tasks, leaves: Sequence[str]) -> float:
    """Return the seconds until weights of one side have left a GPU and the other's are loaded."""
    return sum(part.actors.get(kind, 0) * tasks.move.get(kind, 0.0) for kind in leaves)


def gathered(numbers: LayoutSpec, tasks: Mapping[str, Tasks]) -> dict[str, float]:
    """Return the seconds, by stage, in which the busiest replica gathers a sharded base.

    The result is empty if the base is not sharded.
    """
    any_tasks, replicas = next(iter(tasks.values())), numbers.groups["learner"].actors
    prompts = any_tasks.prompts / replicas
    prompts = math.ceil(prompts) if numbers.share == "prompts" else prompts
    part = part_at_a_time(numbers, any_tasks)
    per_prompt = [each.gathering.of_prompt(replicas, part) for each in tasks.values()]
    regenerated, trained = (max(each) for each in zip(*per_prompt, strict=True))
    return {"regenerate": prompts * regenerated, "update": prompts * trained} if trained else {}


def part_at_a_time(numbers: LayoutSpec, tasks: Tasks) -> float:
    """Return the share of a prompt that a learner regenerates per task."""
    replicas = numbers.groups["learner"].actors
    if numbers.share == "prompts":
        return 1.0
    return math.gcd(tasks.prompts, replicas) / replicas


@dataclass(frozen=True)
class _Part:
    kind: str
    count: int
    actors: Mapping[str, int]
    prompts: float  # of all learners on one of these GPUs


def _by_prompts(assigned: Sequence[GpuAssignment], prompts: int, shared: Share) -> list[_Part]:
    """Group GPUs with the same actors and the same number of prompts of their learners."""
    learners = sum(each.count * each.actors.get("learner", 0) for each in assigned)
    if shared == "samples":
        per_learner = prompts / max(1, learners)
        return [
            _Part(each.kind, each.count, each.actors, each.actors.get("learner", 0) * per_learner)
            for each in assigned
        ]
    share, remainder = divmod(prompts, max(1, learners))
    parts = []
    for each in assigned:
        on_each = each.actors.get("learner", 0)
        first = min(each.count, remainder // on_each if on_each else 0)
        remainder -= first * on_each
        parts += [
            _Part(each.kind, count, each.actors, on_each * (share + extra))
            for count, extra in ((first, 1), (each.count - first, 0))
            if count
        ]
    return parts


def _scoring(part: _Part, tasks: Tasks, actors: Mapping[str, int]) -> float:
    """Return the seconds that scorers on a GPU work; actors of a service share images evenly."""
    return sum(
        seconds * part.actors.get(kind, 0) / actors[kind]
        for kind, seconds in tasks.score.items()
        if actors.get(kind)
    )


def fill(slots: Sequence[tuple[int, float, float]], tasks: int) -> tuple[float, list[int]]:
    """Assign equal tasks greedily, each to the slot that would finish it first.

    ``slots`` has (number of equal slots, busy until, seconds per task). Returns (when the last task
    ends, number of tasks of each entry of ``slots``).
    """
    done = [0] * len(slots)
    heap = [(busy + each, i) for i, (count, busy, each) in enumerate(slots) if count]
    heapq.heapify(heap)
    ended = 0.0
    while tasks > 0 and heap:
        ended, i = heapq.heappop(heap)
        assigned = min(slots[i][0], tasks)
        done[i] += assigned
        tasks -= assigned
        heapq.heappush(heap, (ended + slots[i][2], i))
    return ended, done
