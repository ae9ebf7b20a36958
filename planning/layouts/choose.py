"""The best predicted layout that fits. A pure function of configuration, GPUs and costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from configs.load import ConfigError
from configs.schema import RunConfig
from configs.services import Share
from planning.layouts.costs import Costs
from planning.layouts.gpus import Gpus, Laid, lay
from planning.layouts.numbers import TAKE_TURNS, Group, Numbers, completed
from planning.layouts.predict import Prediction, bound, predict

LEARNER, ROLLOUT = 0.52, 0.36
"""Shares where both are on a GPU: no two learners fit on one (NCCL), and two rollout actors fit on
a GPU without a learner. The rest is for scorers and the encoder.
"""
ROLLOUT_ALONE = 0.8
NAMES = {"rollout": "rollout actors", "learner": "the learner's frozen weights"}
Replicas = tuple[int, Share]
"""How many, and what they share."""


class DoesNotFit(ConfigError):
    """No layout fits: the closest would hold ``gb`` on its fullest GPU, ``short`` too much."""

    def __init__(self, line: str, gb: float, short: float):
        super().__init__([line])
        self.gb, self.short = gb, short


@dataclass(frozen=True)
class Candidate:
    """A layout that was looked at. ``why_not`` says why it cannot be; then nothing is predicted.
    ``gb`` is what the fullest GPU holds; ``short`` what it lacks.
    """

    numbers: Numbers
    prediction: Prediction | None
    why_not: str | None
    gb: float = 0.0
    short: float = 0.0

    @property
    def seconds(self) -> float:
        """Predicted seconds per iteration; infinite where it cannot be."""
        return self.prediction.iteration if self.prediction else math.inf


@dataclass(frozen=True)
class Choice:
    """What was chosen, why, and the best of each kind of layout that was looked at."""

    best: Candidate
    table: Sequence[Candidate]
    why: str
    bound: float


def choose(config: RunConfig, gpus: Sequence[Gpus], costs: Costs) -> Choice:
    """The layout of ``config`` on ``gpus``. Raises DoesNotFit, a line, where none fits."""
    asked = config.layout.mode if config.layout else "auto"
    looked = _looked(config, gpus, costs)
    table = _best_of_each(looked)
    mine = [each for each in looked if _may_be(config, each, gpus)]
    if not any(each.prediction for each in mine):
        raise _nothing_fits(config, mine or looked, gpus, costs)
    # of equals that with the fewest actors
    best = min(mine, key=lambda each: (round(each.seconds, 6), _size(each.numbers)))
    others = [each for each in table if each.prediction and each.numbers.mode != best.numbers.mode]
    why = "asked for" if asked != "auto" else "the only one that fits"
    if asked == "auto" and others:
        why = "the fastest by prediction"
    if best.numbers.ahead and "explore_ahead" not in config.model_fields_set:
        why += "; rollout actors explore ahead, with the policy of the iteration before"
    if best.numbers.leaves:
        who = " and ".join(NAMES[kind] for kind in best.numbers.leaves)
        why += f"; {who} leave to host memory between turns, as both do not fit on one GPU"
    return Choice(best, table, why, bound(costs.tasks, gpus))


def assessed(numbers: Numbers, gpus: Sequence[Gpus], costs: Costs) -> Candidate:
    """A layout with its prediction, or with why it cannot be."""
    laid = lay(numbers, gpus)
    if laid is None:
        return Candidate(numbers, None, "its shares have no room on these GPUs")
    room = {each.kind: each.memory_gb for each in gpus}
    held = [(costs.held_gb(each, numbers), each) for each in laid]
    gb = max(size for size, _ in held)
    if why := _no_host_memory(numbers, laid, gpus, costs):
        return Candidate(numbers, None, why)
    short, fullest = max(((size - room[each.kind], each) for size, each in held), key=_first)
    if short > 0:
        who = " + ".join(sorted(fullest.actors))
        why = (
            f"{who}: {room[fullest.kind] + short:.1f} GB on a {fullest.kind} of"
            f" {room[fullest.kind]:g} GB, {short:.1f} GB short"
        )
        if numbers.leaves and short <= costs.encoder_gb(fullest):
            why += "; it fits with prompts.encode_once = true"
        return Candidate(numbers, None, why, gb, short)
    return Candidate(numbers, predict(numbers, laid, costs.tasks), None, gb)


def _no_host_memory(
    numbers: Numbers, laid: Sequence[Laid], gpus: Sequence[Gpus], costs: Costs
) -> str | None:
    """Why what leaves the GPUs has no place on a node; None: it has, or nothing is known of it."""
    room = {each.kind: each.host_gb for each in gpus}
    for each in laid:
        needed, there = costs.host_gb(each, numbers), room[each.kind]
        if there is not None and needed > there:
            return (
                f"{' and '.join(numbers.leaves)} between turns: {needed:.1f} GB of host memory for"
                f" each {each.kind}, a node has {there:.1f} GB for each"
            )
    return None


def _first(pair: tuple[float, object]) -> float:
    return pair[0]


def _size(numbers: Numbers) -> int:
    return sum(group.actors for group in numbers.groups.values())


def _may_be(config: RunConfig, candidate: Candidate, gpus: Sequence[Gpus]) -> bool:
    """Whether a candidate is what was asked for.

    Exploring ahead trains on what an older policy found, so it is not chosen for speed alone while
    replicas can use every GPU: only where GPUs have rollout actors and no learner anyway.
    """
    assert config.layout is not None
    mode, numbers = config.layout.mode, candidate.numbers
    if mode != "auto" and numbers.mode != mode and config.plan.explore is not None:
        return False
    free = mode == "split" or len(gpus) > 1 or gpus[0].count > _most_replicas(config)
    return bool(not numbers.ahead or "explore_ahead" in config.model_fields_set or free)


def _best_of_each(looked: Sequence[Candidate]) -> list[Candidate]:
    found: dict[tuple[str, int, str, bool], Candidate] = {}
    for each in looked:
        groups = each.numbers.groups.values()
        kinds = "/".join(sorted({group.accelerator or "" for group in groups if group.gpus}))
        key = (each.numbers.mode, each.numbers.ahead, kinds, bool(each.numbers.leaves))
        if key not in found or (each.seconds, each.short) < (found[key].seconds, found[key].short):
            found[key] = each
    return sorted(found.values(), key=lambda each: each.seconds)


# ---- candidates


def _looked(config: RunConfig, gpus: Sequence[Gpus], costs: Costs) -> list[Candidate]:
    """Every candidate, and where rollout actors and learner do not fit on one GPU, the same with
    weights that leave it between turns.
    """
    found: list[Candidate] = []
    for numbers in _candidates(config, gpus):
        found.append(assessed(numbers, gpus, costs))
        if found[-1].short > 0 and costs.parts:
            found += [assessed(each, gpus, costs) for each in _with_turns(config, numbers)]
    return found


def _with_turns(config: RunConfig, numbers: Numbers) -> Iterator[Numbers]:
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


def _candidates(config: RunConfig, gpus: Sequence[Gpus]) -> Iterator[Numbers]:
    """Every layout worth a prediction, with what is given by hand in its place; each once."""
    seen: set[str] = set()
    explores = config.plan.explore is not None
    two_stages = explores and config.plan.regenerate
    aheads = (0, 1) if two_stages else (0,)
    several = len(gpus) > 1
    made: list[Numbers] = []
    for one in gpus:
        named = one.kind if several else None
        made += [
            replace(_shared(config, one, count, named), share=share)
            for count, share in _replicas(config, one.count)
        ]
        if not explores:
            continue
        made += [
            replace(_split(config, one, one.count - count, one, count, named, named), share=share)
            for count, share in _replicas(config, one.count - 1)
        ]
        limit = (config.layout.gpus if config.layout else None) or sum(g.count for g in gpus)
        made += [
            replace(
                _split(
                    config, one, min(one.count, limit - count), other, count, one.kind, other.kind
                ),
                share=share,
            )
            for other in gpus
            if other is not one
            for count, share in _replicas(config, min(other.count, limit - 1))
        ]
    for numbers in made:
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
            if (key := repr(final)) not in seen:
                seen.add(key)
                yield final


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
        fewest = {-(-prompts // count): count for count in range(most, 0, -1)}
        counts = [count for count in sorted({*fewest.values(), most}) if count >= least]
        parts = [
            count for count in {gpus // 2, gpus} if least <= count <= samples and prompts % count
        ]
    if "share" in learner.model_fields_set:
        by_hand = counts if learner.share == "prompts" else sorted({*counts, *parts})
        return [(count, learner.share) for count in by_hand]
    return [*((count, "prompts") for count in counts), *((count, "samples") for count in parts)]


def _most_replicas(config: RunConfig) -> int:
    """Of those that all have something to train on."""
    prompts, learner = config.prompts.per_iteration, config.services.learner
    by_prompts = "share" in learner.model_fields_set and learner.share == "prompts"
    return prompts if by_prompts else prompts * config.selection.keep


def _shared(config: RunConfig, gpus: Gpus, learners: int, kind: str | None) -> Numbers:
    """A learner replica and a rollout actor on each GPU, two rollout actors where no learner is."""
    explores = config.plan.explore is not None
    share = _cpus(config, gpus, 2 + 4)
    groups = {"learner": Group(learners, LEARNER, 4 * share, kind)}
    if explores:
        actors = learners + 2 * (gpus.count - learners)
        groups["rollout"] = Group(actors, ROLLOUT, 2 * share, kind)
    groups |= _small(config, 1 - LEARNER - ROLLOUT, learners, share, kind)
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


def _small(
    config: RunConfig, room: float, count: int, cpus: float, kind: str | None
) -> dict[str, Group]:
    """Scorers, one of a service on each GPU, and the encoder, in what a GPU has left.

    Each share is more than half of what is left, so that no GPU gets two of the same.
    """
    groups = {}
    for service in ("reward", *(f"scorers.{label}" for label in config.services.scorers)):
        labels = config.scorers_of(service)
        if any(needs_gpu(s.name) for s in config.rewards.everyone if s.label in labels):
            share = math.floor(room * 0.55 * 1e4) / 1e4
            groups[service] = Group(count, share, cpus, kind)
            room -= share
    return groups | {"encoder": Group(1, math.floor(room * 0.9 * 1e4) / 1e4, cpus, kind)}


def needs_gpu(scorer: str) -> bool:
    """Whether a scorer has a model; one that is not built in may have."""
    return scorer not in ("shapes", "http", "jpeg_compressibility", "jpeg_incompressibility")


def _cpus(config: RunConfig, gpus: Gpus, per_gpu: float) -> float:
    """CPUs for each one that is wanted: 1, or less where a node has too few."""
    scorers = 1 + len(config.services.scorers)
    return min(1.0, math.floor(100 * max(0.04, gpus.cpus * 0.8) / (per_gpu + scorers + 1)) / 100)


# ---- nothing fits


def _nothing_fits(
    config: RunConfig, looked: Sequence[Candidate], gpus: Sequence[Gpus], costs: Costs
) -> DoesNotFit:
    """A line: which model on which GPU, what is short by how much, the nearest layout that fits."""
    closest = min(looked, key=lambda each: (each.short <= 0, each.short), default=None)
    there = " and ".join(f"{each.count} x {each.kind} of {each.memory_gb:g} GB" for each in gpus)
    mode = config.layout.mode if config.layout else "auto"
    why = (
        closest.why_not if closest else "it needs rollout actors and learners on GPUs of their own"
    )
    if not closest and config.services.learner.shard == "base":
        why = "replicas that share the base (services.learner.shard) need a GPU each, two at least"
    crowded = (c.why_not for c in looked if c.numbers.leaves and c.why_not and not c.short)
    if (no_room := next(crowded, None)) is not None:
        why = f"{why}; with {no_room}"
    line = (
        f"layout.mode = {mode!r}: {config.model.path} does not fit on {there}: {why}; nearest that"
        f" fits: {_nearest(config, gpus, costs) or 'none: fewer images in a pass need less memory'}"
    )
    return DoesNotFit(line, closest.gb if closest else 0.0, closest.short if closest else 0.0)


def _nearest(config: RunConfig, gpus: Sequence[Gpus], costs: Costs) -> str | None:
    """The other mode, more GPUs of the kind, or larger ones."""
    kind = max(gpus, key=lambda each: each.memory_gb)
    assert config.layout is not None
    layout = config.layout.model_copy(update={"mode": "auto"})
    free = config.model_copy(update={"layout": layout})
    for more in [
        count for count in (kind.count, kind.count + 1, 2, 4, 8, 16) if count >= kind.count
    ]:
        for each in _looked(free, [replace(kind, count=more)], costs):
            if each.prediction:
                what = each.numbers.describe()
                return f"{each.numbers.mode} on {more} x {kind.kind} ({what})"
    least = min((each.gb for each in _looked(free, gpus, costs) if each.gb), default=0)
    return f"GPUs of at least {least:.0f} GB" if least else None
