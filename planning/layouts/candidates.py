"""Layouts worth a prediction: how many actors of each service, in which shares of the GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from configs.schema import RunConfig
from configs.services import Share
from planning.layouts.gpus import Gpus
from planning.layouts.numbers import TAKE_TURNS, Group, Numbers, completed
from rewards import may_use_gpu

LEARNER, ROLLOUT = 0.52, 0.36
"""Shares where both are on a GPU: no two learners fit on one (NCCL), and two rollout actors fit on
a GPU without a learner. The rest is for scorers and the encoder.
"""
ROLLOUT_ALONE = 0.8
Replicas = tuple[int, Share]
"""The number of learner replicas, and what they share."""


def candidates(config: RunConfig, gpus: Sequence[Gpus]) -> Iterator[Numbers]:
    """Every layout worth a prediction, with what is given by hand in its place; each once."""
    seen: set[str] = set()
    explores = config.plan.explore is not None
    aheads = (0, 1) if explores and config.plan.regenerate else (0,)
    for numbers in _synchronous(config, gpus):
        groups = numbers.groups
        # ahead of learners on the same GPUs gains nothing
        everywhere = (
            numbers.mode == "shared"
            and explores
            and (groups["rollout"].actors == groups["learner"].actors)
        )
        for ahead in aheads[:1] if everywhere else aheads:
            final = completed(config, replace(numbers, ahead=ahead))
            if final.ahead and final.leaves:  # both work at the same time then
                continue
            # by its text, as mappings have no hash
            if (key := repr(final)) not in seen:
                seen.add(key)
                yield final


def _synchronous(config: RunConfig, gpus: Sequence[Gpus]) -> Iterator[Numbers]:
    """Layouts that do not explore ahead, before what is given by hand is put in."""
    limit = (config.layout.gpus if config.layout else None) or sum(each.count for each in gpus)
    for one in gpus:
        named = one.kind if len(gpus) > 1 else None
        for count, share in _replicas(config, one.count):
            yield replace(_shared(config, one, count, named), share=share)
        for count, share in _replicas(config, one.count - 1):
            alone = (
                _beside(config, one, count, named)
                if config.plan.explore is None
                else _split(config, one, one.count - count, one, count, named, named)
            )
            yield replace(alone, share=share)
        for other in gpus if config.plan.explore is not None else ():
            if other is not one:
                for count, share in _replicas(config, min(other.count, limit - 1)):
                    rollouts = min(one.count, limit - count)
                    apart = _split(config, one, rollouts, other, count, one.kind, other.kind)
                    yield replace(apart, share=share)


def _replicas(config: RunConfig, gpus: int) -> list[Replicas]:
    """Numbers of replicas on at most so many GPUs, and what they share: the smallest of those
    whose busiest replica has as many prompts, the largest, and those that share samples where
    whole prompts do not come out even.
    """
    prompts, learner = config.prompts.per_iteration, config.services.learner
    samples = prompts * config.selection.keep
    most, least = min(gpus, prompts), 2 if learner.shard == "base" else 1
    if "replicas" in learner.model_fields_set:
        given = learner.replicas
        counts: list[int] = [given] if given <= most else []
        parts = [given] if given <= min(gpus, samples) else []
    else:
        # counted down: of counts that leave the busiest as many prompts the smallest stays
        fewest = {-(-prompts // count): count for count in range(most, 0, -1)}
        counts = [count for count in sorted({*fewest.values(), most}) if count >= least]
        parts = [
            count for count in {gpus // 2, gpus} if least <= count <= samples and prompts % count
        ]
    if "share" in learner.model_fields_set:
        by_hand = counts if learner.share == "prompts" else sorted({*counts, *parts})
        return [(count, learner.share) for count in by_hand]
    return [*((count, "prompts") for count in counts), *((count, "samples") for count in parts)]


def most_replicas(config: RunConfig) -> int:
    """The most replicas that all have something to train on."""
    prompts, learner = config.prompts.per_iteration, config.services.learner
    by_prompts = "share" in learner.model_fields_set and learner.share == "prompts"
    return prompts if by_prompts else prompts * config.selection.keep


def _shared(config: RunConfig, gpus: Gpus, learners: int, kind: str | None) -> Numbers:
    """A learner replica and a rollout actor on each GPU, two rollout actors where no learner is."""
    explores = config.plan.explore is not None
    room = 1 - LEARNER - (ROLLOUT if explores else 0)
    share = _cpus(config, gpus, 2 + 4)
    groups = {"learner": Group(learners, LEARNER, 4 * share, kind)}
    if explores:
        actors = learners + 2 * (gpus.count - learners)
        groups["rollout"] = Group(actors, ROLLOUT, 2 * share, kind)
    groups |= _small(config, room, learners, share, kind)
    return Numbers("shared", groups)


def _split(
    config: RunConfig,
    first: Gpus,
    rollout: int,
    second: Gpus,
    learners: int,
    rollouts: str | None,
    trainers: str | None,
) -> Numbers:
    """Rollout actors, scorers and encoder on GPUs without a learner."""
    one, other = _cpus(config, first, 2), _cpus(config, second, 4)
    chunks = -(-config.explore.pool_size // config.explore.chunk_size)
    rollout = min(rollout, config.prompts.per_iteration * chunks)  # more would have nothing to do
    groups = {
        "learner": Group(learners, 1.0, 4 * other, trainers),
        "rollout": Group(rollout, ROLLOUT_ALONE, 2 * one, rollouts),
        **_small(config, 1 - ROLLOUT_ALONE, rollout, one, rollouts),
    }
    return Numbers("split", groups)


def _beside(config: RunConfig, gpus: Gpus, learners: int, kind: str | None) -> Numbers:
    """For an arm that explores nothing: scorers and encoder on the GPUs without a learner."""
    cpus = _cpus(config, gpus, 4)
    small = _small(config, 1.0, gpus.count - learners, cpus, kind)
    return Numbers("split", {"learner": Group(learners, 1.0, 4 * cpus, kind), **small})


def _small(
    config: RunConfig, room: float, count: int, cpus: float, kind: str | None
) -> dict[str, Group]:
    """Scorers, one of a service on each GPU, and the encoder, in what a GPU has left.

    Each share is more than half of what is left, so that no GPU gets two of the same.
    """
    groups = {}
    for service in ("reward", *(f"scorers.{label}" for label in config.services.scorers)):
        labels = config.scorers_of(service)
        if any(may_use_gpu(s.name) for s in config.rewards.everyone if s.label in labels):
            # rounded down to ten-thousandths, in which Ray counts: a sum above 1 would fit no GPU
            share = math.floor(room * 0.55 * 1e4) / 1e4
            groups[service] = Group(count, share, cpus, kind)
            room -= share
    return groups | {"encoder": Group(1, math.floor(room * 0.9 * 1e4) / 1e4, cpus, kind)}


def _cpus(config: RunConfig, gpus: Gpus, per_gpu: float) -> float:
    """CPUs for each one that is wanted: 1, or less where a node has too few."""
    scorers = 1 + len(config.services.scorers)
    return min(1.0, math.floor(100 * max(0.04, gpus.cpus * 0.8) / (per_gpu + scorers + 1)) / 100)


def with_turns(config: RunConfig, numbers: Numbers) -> Iterator[Numbers]:
    """A shared layout in which one side leaves between turns, or both."""
    if numbers.mode != "shared" or numbers.ahead or "rollout" not in numbers.groups:
        return
    whole = config.services.learner.shard == "none" and config.lora.base == "full"
    seen = {numbers.leaves}
    for leaves in (("rollout",), ("learner",), TAKE_TURNS) if whole else (("rollout",),):
        other = completed(config, replace(numbers, leaves=leaves))
        if other.leaves not in seen:
            seen.add(other.leaves)
            yield other
