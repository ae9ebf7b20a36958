"""Choose the best predicted layout that fits: a pure function of configuration, GPUs and costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from configs.load import ConfigError
from configs.schema import RunConfig
from planning.layouts.candidates import candidates, exploring_gpus, most_replicas, with_turns
from planning.layouts.costs import Costs
from planning.layouts.gpus import GpuAssignment, Gpus, assign_gpus
from planning.layouts.predict import Prediction, bound, predict
from planning.layouts.spec import LayoutSpec
from policy.precision.accelerators import ACCELERATORS
from policy.precision.backends import BACKENDS

NAMES = {"rollout": "rollout actors", "learner": "the learner's frozen weights"}


class DoesNotFit(ConfigError):
    """No layout fits: the closest one needs ``gb`` GB on its fullest GPU, ``short`` GB too much."""

    def __init__(self, line: str, gb: float, short: float):
        super().__init__([line])
        self.gb, self.short = gb, short


@dataclass(frozen=True)
class Candidate:
    """A layout that was considered.

    ``why_not`` is the reason if it is impossible; then there is no prediction. ``gb`` are the GB
    that its fullest GPU holds, ``short`` the GB that it lacks.
    """

    numbers: LayoutSpec
    prediction: Prediction | None
    why_not: str | None
    gb: float = 0.0
    short: float = 0.0

    @property
    def seconds(self) -> float:
        """Predicted seconds per iteration; infinite if the layout is impossible."""
        return self.prediction.iteration if self.prediction else math.inf


@dataclass(frozen=True)
class Choice:
    """The chosen layout, the reason, and the best of each kind of layout that was considered."""

    best: Candidate
    table: Sequence[Candidate]
    why: str
    bound: float


def choose(config: RunConfig, gpus: Sequence[Gpus], costs: Costs) -> Choice:
    """Choose the layout of ``config`` on ``gpus``.

    Raises DoesNotFit if none fits, ConfigError if no GPU runs the configured precision of
    exploring.
    """
    if not exploring_gpus(config, gpus):
        kinds = " or ".join(each.kind for each in gpus)
        raise ConfigError(
            f"explore.backend: {config.explore.backend!r} does not run on {kinds}: use auto, or"
            f" {', '.join(name for name in BACKENDS if _runs(name, gpus))}"
        )
    mode = config.layout.mode if config.layout else "auto"
    considered = _considered(config, gpus, costs)
    table = _best_of_each(considered)
    allowed = [each for each in considered if _may_be(config, each, gpus)]
    if not any(each.prediction for each in allowed):
        raise _nothing_fits(config, allowed or considered, gpus, costs)
    # among equally fast layouts the one with the fewest actors; rounded to a microsecond, so that
    # summing the same seconds in another order makes no difference
    best = min(allowed, key=lambda each: (round(each.seconds, 6), _size(each.numbers)))
    others = [each for each in table if each.prediction and each.numbers.mode != best.numbers.mode]
    why = "as requested" if mode != "auto" else "the only one that fits"
    if mode == "auto" and others:
        why = "the fastest by prediction"
    if best.numbers.ahead and "explore_ahead" not in config.model_fields_set:
        why += "; rollout actors explore ahead, with the policy of the previous iteration"
    if best.numbers.leaves:
        leaving = " and ".join(NAMES[kind] for kind in best.numbers.leaves)
        why += f"; {leaving} move to host memory between turns, because both do not fit on one GPU"
    return Choice(best, table, why, bound(costs.tasks, gpus))


def assessed(numbers: LayoutSpec, gpus: Sequence[Gpus], costs: Costs) -> Candidate:
    """Return a layout with its prediction, or with the reason why it is impossible."""
    assigned = assign_gpus(numbers, gpus)
    if assigned is None:
        return Candidate(numbers, None, "its GPU shares do not fit on these GPUs")
    room = {each.kind: each.memory_gb for each in gpus}
    held = [(costs.held_gb(each, numbers), each) for each in assigned]
    gb = max(size for size, _ in held)
    if why := _no_host_memory(numbers, assigned, gpus, costs):
        return Candidate(numbers, None, why)
    lacking = [(size - room[each.kind], each) for size, each in held]
    short, fullest = max(lacking, key=itemgetter(0))
    if short > 0:
        actors = " + ".join(sorted(fullest.actors))
        why = (
            f"{actors}: {room[fullest.kind] + short:.1f} GB on a {fullest.kind} of"
            f" {room[fullest.kind]:g} GB, {short:.1f} GB short"
        )
        if numbers.leaves and short <= costs.encoder_gb(fullest):
            why += "; it fits with prompts.encode_once = true"
        return Candidate(numbers, None, why, gb, short)
    return Candidate(numbers, predict(numbers, assigned, costs.tasks), None, gb)


def _no_host_memory(
    numbers: LayoutSpec, assigned: Sequence[GpuAssignment], gpus: Sequence[Gpus], costs: Costs
) -> str | None:
    """Return why the weights that leave GPUs do not fit into host memory; None if they do.

    None also if the host memory of the nodes is not known.
    """
    room = {part.kind: part.host_gb for part in gpus}
    for part in assigned:
        needed, available = costs.host_gb(part, numbers), room[part.kind]
        if available is not None and needed > available:
            return (
                f"{' and '.join(numbers.leaves)} between turns: {needed:.1f} GB of host memory per"
                f" {part.kind}, but a node has {available:.1f} GB for each"
            )
    return None


def _runs(backend: str, gpus: Sequence[Gpus]) -> bool:
    return any(ACCELERATORS[each.kind].runs(BACKENDS[backend]) for each in gpus)


def _size(numbers: LayoutSpec) -> int:
    return sum(group.actors for group in numbers.groups.values())


def _may_be(config: RunConfig, candidate: Candidate, gpus: Sequence[Gpus]) -> bool:
    """Return True if the configuration allows a candidate.

    Exploring ahead trains on samples of an older policy, so it is not chosen for speed alone as
    long as learner replicas can use every GPU. It is allowed if some GPUs have rollout actors but
    no learner anyway (mode split, several kinds of GPU, or more GPUs than replicas can use), or if
    ``explore_ahead`` is set.
    """
    assert config.layout is not None
    mode, numbers = config.layout.mode, candidate.numbers
    if mode != "auto" and numbers.mode != mode and config.plan.explore is not None:
        return False
    free = mode == "split" or len(gpus) > 1 or gpus[0].count > most_replicas(config)
    return bool(not numbers.ahead or "explore_ahead" in config.model_fields_set or free)


def _best_of_each(considered: Sequence[Candidate]) -> list[Candidate]:
    """Return the best candidate of each kind of layout, the fastest first."""
    best: dict[tuple[str, int, str, bool], Candidate] = {}
    for candidate in considered:
        groups = candidate.numbers.groups.values()
        kinds = "/".join(sorted({group.accelerator or "" for group in groups if group.gpus}))
        key = (
            candidate.numbers.mode,
            candidate.numbers.ahead,
            kinds,
            bool(candidate.numbers.leaves),
        )
        if key not in best or (candidate.seconds, candidate.short) < (
            best[key].seconds,
            best[key].short,
        ):
            best[key] = candidate
    return sorted(best.values(), key=lambda candidate: candidate.seconds)


def _considered(config: RunConfig, gpus: Sequence[Gpus], costs: Costs) -> list[Candidate]:
    """Assess every candidate.

    If rollout actors and learner do not fit on a GPU together, the variants in which weights leave
    it between turns are assessed too.
    """
    layouts: list[Candidate] = []
    for numbers in candidates(config, gpus):
        layouts.append(assessed(numbers, gpus, costs))
        if layouts[-1].short > 0 and costs.parts:
            layouts += [assessed(each, gpus, costs) for each in with_turns(config, numbers)]
    return layouts


def _nothing_fits(
    config: RunConfig, considered: Sequence[Candidate], gpus: Sequence[Gpus], costs: Costs
) -> DoesNotFit:
    """Return the error: model and GPUs, how much memory is short, the nearest layout that fits."""
    closest = min(considered, key=lambda each: (each.short <= 0, each.short), default=None)
    there = " and ".join(f"{each.count} x {each.kind} of {each.memory_gb:g} GB" for each in gpus)
    mode = config.layout.mode if config.layout else "auto"
    why = closest.why_not if closest else "it needs separate GPUs for rollout actors and learners"
    learner, most = config.services.learner, max((each.count for each in gpus), default=0)
    if not closest and "replicas" in learner.model_fields_set and learner.replicas > most:
        why = (
            f"services.learner.replicas = {learner.replicas} need a GPU of one kind each; with"
            " services.learner.elastic = true, --resume may use fewer"
        )
    elif not closest and learner.shard == "base":
        why = (
            "replicas that share the base (services.learner.shard) need one GPU each, at least two"
        )
    crowded = (c.why_not for c in considered if c.numbers.leaves and c.why_not and not c.short)
    if (no_room := next(crowded, None)) is not None:
        why = f"{why}; with {no_room}"
    line = (
        f"layout.mode = {mode!r}: {config.model.path} does not fit on {there}: {why}; nearest"
        " layout that fits:"
        f" {_nearest(config, gpus, costs) or 'none: reduce the number of images per pass'}"
    )
    return DoesNotFit(line, closest.gb if closest else 0.0, closest.short if closest else 0.0)


def _nearest(config: RunConfig, gpus: Sequence[Gpus], costs: Costs) -> str | None:
    """Describe the nearest layout that fits: the other mode, more GPUs, or larger ones."""
    kind = max(gpus, key=lambda each: each.memory_gb)
    assert config.layout is not None
    layout = config.layout.model_copy(update={"mode": "auto"})
    any_mode = config.model_copy(update={"layout": layout})
    for more in [
        count for count in (kind.count, kind.count + 1, 2, 4, 8, 16) if count >= kind.count
    ]:
        for each in _considered(any_mode, [replace(kind, count=more)], costs):
            if each.prediction:
                what = each.numbers.describe()
                return f"{each.numbers.mode} on {more} x {kind.kind} ({what})"
    smallest = min((each.gb for each in _considered(any_mode, gpus, costs) if each.gb), default=0)
    return f"GPUs of at least {smallest:.0f} GB" if smallest else None
