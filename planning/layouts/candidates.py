"""Candidate layouts: the number of actors of each service and their shares of the GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from configs.schema import RunConfig
from configs.services import Share
from planning.layouts.gpus import Gpus
from planning.layouts.spec import TAKE_TURNS, Group, LayoutSpec, apply_explicit_fields
from policy.precision.accelerators import ACCELERATORS
from policy.precision.backends import BACKENDS
from rewards import may_use_gpu

LEARNER, ROLLOUT = 0.52, 0.36
"""GPU shares in a shared layout: two learners must not fit on one GPU (NCCL), two rollout actors
fit on a GPU without a learner. The rest is for scorers and the encoder.
"""
ROLLOUT_ALONE = 0.8
Replicas = tuple[int, Share]
"""The number of learner replicas, and whether they share prompts or samples."""


def candidates(config: RunConfig, gpus: Sequence[Gpus]) -> Iterator[LayoutSpec]:
    """Yield every layout worth a prediction once, with explicitly configured values applied."""
    seen: set[str] = set()
    explores = config.plan.explore is not None
    aheads = (0, 1) if explores and config.plan.regenerate else (0,)
    for numbers in _synchronous(config, gpus):
        groups = numbers.groups
        # exploring ahead gains nothing if every GPU has both rollout actors and a learner
        on_all_gpus = (
            numbers.mode == "shared"
            and explores
            and (groups["rollout"].actors == groups["learner"].actors)
        )
        for ahead in aheads[:1] if on_all_gpus else aheads:
            final = apply_explicit_fields(config, replace(numbers, ahead=ahead))
            if final.ahead and final.leaves:  # exploring ahead leaves no turns to take
                continue
            # compared by repr, because mappings are not hashable
            if (key := repr(final)) not in seen:
                seen.add(key)
                yield final


def _synchronous(config: RunConfig, gpus: Sequence[Gpus]) -> Iterator[LayoutSpec]:
    """Yield layouts that do not explore ahead, before explicitly configured values are applied."""
    limit = (config.layout.gpus if config.layout else None) or sum(each.count for each in gpus)
    for first in exploring_gpus(config, gpus):
        named = first.kind if len(gpus) > 1 else None
        for count, share in _replicas(config, first.count):
            yield replace(_shared(config, first, count, named), share=share)
        for count, share in _replicas(config, first.count - 1):
            layout = (
                _beside(config, first, count, named)
                if config.plan.explore is None
                else _split(config, first, first.count - count, first, count, named, named)
            )
            yield replace(layout, share=share)
        for second in gpus if config.plan.explore is not None else ():
            if second is not first:
                for count, share in _replicas(config, min(second.count, limit - 1)):
                    rollouts = min(first.count, limit - count)
                    layout = _split(config, first, rollouts, second, count, first.kind, second.kind)
                    yield replace(layout, share=share)


def exploring_gpus(config: RunConfig, gpus: Sequence[Gpus]) -> list[Gpus]:
    """Return the GPUs that run the configured precision of exploring.

    They are all GPUs if nothing is explored, or rollout actors choose the precision ("auto").
    """
    explore = config.plan.explore
    if explore is None or explore.backend == "auto":
        return [*gpus]
    backend = BACKENDS[explore.backend]
    return [g for g in gpus if g.kind not in ACCELERATORS or ACCELERATORS[g.kind].runs(backend)]


def _replicas(config: RunConfig, gpus: int) -> list[Replicas]:
    """Return candidates for the number of replicas on at most ``gpus`` GPUs and what they share.

    Of numbers whose busiest replica has equally many prompts only the smallest is included, besides
    the largest possible one. Replicas share samples if prompts cannot be divided evenly.
    """
    prompts, learner = config.prompts.per_iteration, config.services.learner
    samples = prompts * config.selection.keep
    largest, smallest = min(gpus, prompts), 2 if learner.shard == "base" else 1
    if "replicas" in learner.model_fields_set:
        configured = learner.replicas
        counts: list[int] = [configured] if configured <= largest else []
        by_samples = [configured] if configured <= min(gpus, samples) else []
    else:
        # counting down, so that the smallest of equivalent counts overwrites the larger ones
        smallest_by_load = {-(-prompts // count): count for count in range(largest, 0, -1)}
        counts = [
            count for count in sorted({*smallest_by_load.values(), largest}) if count >= smallest
        ]
        by_samples = [
            count for count in {gpus // 2, gpus} if smallest <= count <= samples and prompts % count
        ]
    if "share" in learner.model_fields_set:
        allowed = counts if learner.share == "prompts" else sorted({*counts, *by_samples})
        return [(count, learner.share) for count in allowed]
    return [
        *((count, "prompts") for count in counts),
        *((count, "samples") for count in by_samples),
    ]


def most_replicas(config: RunConfig) -> int:
    """Return the largest number of replicas that all have something to train on."""
    prompts, learner = config.prompts.per_iteration, config.services.learner
    by_prompts = "share" in learner.model_fields_set and learner.share == "prompts"
    return prompts if by_prompts else prompts * config.selection.keep


def _shared(config: RunConfig, gpus: Gpus, learners: int, kind: str | None) -> LayoutSpec:
    """Return a layout with a learner and a rollout actor per GPU, or two actors and no learner."""
    explores = config.plan.explore is not None
    room = 1 - LEARNER - (ROLLOUT if explores else 0)
    share = _cpus(config, gpus, 2 + 4)
    groups = {"learner": Group(learners, LEARNER, 4 * share, kind)}
    if explores:
        actors = learners + 2 * (gpus.count - learners)
        groups["rollout"] = Group(actors, ROLLOUT, 2 * share, kind)
    groups |= _small(config, room, learners, share, kind)
    return LayoutSpec("shared", groups)


def _split(
    config: RunConfig,
    first: Gpus,
    rollout: int,
    second: Gpus,
    learners: int,
    rollouts: str | None,
    trainers: str | None,
) -> LayoutSpec:
    """Return a layout with rollout actors, scorers and encoder on GPUs without a learner."""
    first_cpus, second_cpus = _cpus(config, first, 2), _cpus(config, second, 4)
    chunks = -(-config.explore.pool_size // config.explore.chunk_size)
    rollout = min(rollout, config.prompts.per_iteration * chunks)  # more would have nothing to do
    groups = {
        "learner": Group(learners, 1.0, 4 * second_cpus, trainers),
        "rollout": Group(rollout, ROLLOUT_ALONE, 2 * first_cpus, rollouts),
        **_small(config, 1 - ROLLOUT_ALONE, rollout, first_cpus, rollouts),
    }
    return LayoutSpec("split", groups)


def _beside(config: RunConfig, gpus: Gpus, learners: int, kind: str | None) -> LayoutSpec:
    """Return a layout without rollout actors: scorers and encoder on GPUs without a learner."""
    cpus = _cpus(config, gpus, 4)
    small = _small(config, 1.0, gpus.count - learners, cpus, kind)
    return LayoutSpec("split", {"learner": Group(learners, 1.0, 4 * cpus, kind), **small})


def _small(
    config: RunConfig, room: float, count: int, cpus: float, kind: str | None
) -> dict[str, Group]:
    """Return the groups of the encoder and of scorers, one of each service per GPU.

    They share ``room``, the free part of a GPU. Each scorer takes more than half of what is left,
    so that no GPU gets two actors of the same service.
    """
    groups = {}
    for service in ("reward", *(f"scorers.{label}" for label in config.services.scorers)):
        labels = config.scorers_of(service)
        if any(may_use_gpu(s.name) for s in config.rewards.all_scorers if s.label in labels):
            # rounded down to 1/10,000, the unit of Ray: a sum above 1 would not fit on a GPU
            share = math.floor(room * 0.55 * 1e4) / 1e4
            groups[service] = Group(count, share, cpus, kind)
            room -= share
    return groups | {"encoder": Group(1, math.floor(room * 0.9 * 1e4) / 1e4, cpus, kind)}


def _cpus(config: RunConfig, gpus: Gpus, per_gpu: float) -> float:
    """Return the CPUs per unit of demand: 1, or less if the node has too few."""
    scorers = 1 + len(config.services.scorers)
    return min(1.0, math.floor(100 * max(0.04, gpus.cpus * 0.8) / (per_gpu + scorers + 1)) / 100)


def with_turns(config: RunConfig, numbers: LayoutSpec) -> Iterator[LayoutSpec]:
    """Yield variants of a shared layout in which rollout actors, learner or both leave the GPU.

    Their weights are in host memory between turns. Yields nothing for layouts in which services do
    not take turns.
    """
    if numbers.mode != "shared" or numbers.ahead or "rollout" not in numbers.groups:
        return
    # the weights of a sharded or packed base stay on the GPU
    both = config.services.learner.shard == "none" and config.lora.base == "full"
    seen = {numbers.leaves}
    for leaves in (("rollout",), ("learner",), TAKE_TURNS) if both else (("rollout",),):
        variant = apply_explicit_fields(config, replace(numbers, leaves=leaves))
        if variant.leaves not in seen:
            seen.add(variant.leaves)
            yield variant
