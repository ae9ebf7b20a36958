"""``sol-rl plan CONFIG --from RUN`` for a run on GPUs of one kind: calls take what they took there,
and actors that shared a GPU took turns on it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from configs.load import ConfigError
from configs.schema import RunConfig
from planning.assumptions import Assumptions
from planning.calibration import calibrated
from planning.durations import Durations, Summing
from planning.layouts.gpus import Laid
from planning.make import Plan, make_plan
from planning.placement import Node
from policy.precision.accelerators import ACCELERATORS, accelerator_of
from records.rundir import RunDirectory
from records.timeline import Span, read_spans
from simulator.measured import iteration_seconds, require_same, with_driver
from simulator.services import Hardware

JOINS = ("actor_started", "actor_added", "actor_replaced")
Process = tuple[str, int, int]
"""(service, actor, incarnation)."""


@dataclass(frozen=True)
class RunGpus:
    """The GPU, by its UUID, that each process of a run was on, and what kind all of them are."""

    kind: str
    of: Mapping[Process, str]

    def part_of(self, span: Span) -> str:
        """The GPU that a call used; of an actor without one, a part of its own."""
        return self.of.get((span.service, span.actor, span.incarnation), span.who)

    def laid(self) -> list[Laid]:
        """Who was on each GPU when the run began."""
        actors: dict[str, Counter[str]] = {}
        for (service, _, incarnation), gpu in self.of.items():
            if incarnation == 0:
                actors.setdefault(gpu, Counter())[service] += 1
        return [Laid(self.kind, 1, dict(each)) for each in actors.values()]


def gpus_of_run(rundir: RunDirectory) -> RunGpus:
    """From its events. Raises ConfigError, a line, where they do not say it, or name two kinds."""
    where = f"--from {rundir.path}"
    of: dict[Process, str] = {}
    names: set[str] = set()
    for row in rundir.events():
        if row.get("event") not in JOINS or "capability" not in row:
            continue
        if "gpu" not in row:
            raise ConfigError(
                f"{where}: its events do not say which GPU an actor was on, as it was made by an"
                " earlier version of Sol-RL: train for a few iterations with this one"
            )
        names.add(str(row["device"]))
        of[str(row["kind"]), int(row["actor"]), int(row["incarnation"])] = str(row["gpu"])
    if len(names) != 1:
        found = " and ".join(sorted(names)) or "no GPU at all"
        raise ConfigError(f"{where}: its actors were on {found}: one kind of GPU can be read")
    (name,) = names
    known = accelerator_of(name)
    if known is None:
        listed = ", ".join(ACCELERATORS)
        raise ConfigError(f"{where}: nothing is known of the GPU {name!r} (known: {listed})")
    return RunGpus(next(kind for kind, each in ACCELERATORS.items() if each is known), of)


@dataclass(frozen=True)
class MeasuredOnGpus:
    """A run on GPUs: what its calls take, and how long its iterations took."""

    durations: Durations
    gpus: RunGpus
    seconds: float
    spans: int

    def line(self, name: str) -> str:
        """What a plan with these calls says of the run, which is called ``name``."""
        count = sum(each.count for each in self.gpus.laid())
        return (
            f"from        calls take what they took in {name} ({self.spans} calls on {count} x"
            f" {self.gpus.kind}, in iterations of {self.seconds:.2f} s), and so does publishing;"
            " operations and adding up gradients as counted"
        )


def measured_on_gpus(rundir: RunDirectory, gpus: RunGpus, summing: Summing) -> MeasuredOnGpus:
    """From a run's directory. ``summing``: what adding up gradients is counted to take, as a
    timeline does not tell it from training. Raises ConfigError where there is too little.
    """
    config, seconds = rundir.configuration(), statistics.median(iteration_seconds(rundir))
    spans = read_spans(rundir.timeline_file)
    summed = summing.at(config.services.learner.replicas)
    found = calibrated(config, [_without(span, summed) for span in spans], gpus.part_of, 1.0)
    durations = replace(found.durations, summing=summing, move=_moves(spans))
    hardware = Hardware({gpus.kind: durations}, gpus.laid(), shards=_shards(spans))
    fitted = with_driver(config, hardware, seconds).any_durations
    return MeasuredOnGpus(fitted, gpus, seconds, found.spans)


def plan_from(
    config: RunConfig, rundir: RunDirectory, given: Assumptions, nodes: Sequence[Node] | None
) -> tuple[Plan, MeasuredOnGpus]:
    """The plan of ``config`` with what calls took in a run on GPUs. Raises ConfigError, a line,
    where the run does not tell it.
    """
    gpus, ran = gpus_of_run(rundir), rundir.configuration()
    if given.accelerator not in (None, gpus.kind):
        raise ConfigError(
            f"--accelerator {given.accelerator}: the run of --from was on {gpus.kind}, which does"
            " not tell what calls take on others"
        )
    config = _recomputing_as(config, ran)
    require_same(config, ran)
    given = replace(given, accelerator=gpus.kind)
    counted = make_plan(config, given, nodes).scenarios
    if counted is None:
        raise ConfigError(f"--from: {config.name} has no layout on GPUs, as the run has")
    model = measured_on_gpus(rundir, gpus, counted.mine.durations[gpus.kind].summing)
    plan = make_plan(config, replace(given, measured={gpus.kind: model.durations}), nodes)
    _require_as_many_sharing(plan.config, ran)
    return plan, model


def _recomputing_as(config: RunConfig, ran: RunConfig) -> RunConfig:
    """With the run's share of recomputed blocks, where it is free to choose."""
    if config.optimizer.gradient_checkpointing != "auto":
        return config
    share = {"gradient_checkpointing": ran.optimizer.gradient_checkpointing}
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update=share)})


def _require_as_many_sharing(config: RunConfig, ran: RunConfig) -> None:
    """Raises ConfigError for other replicas that share a base than the run's."""
    ours, theirs = (each.services.learner for each in (config, ran))
    if ours.shard != theirs.shard or (ours.shard == "base" and ours.replicas != theirs.replicas):
        raise ConfigError(
            f"--from: the run has {theirs.replicas} learner replicas with shard = {theirs.shard!r},"
            f" here there are {ours.replicas} with {ours.shard!r}: what they gather from each other"
            " is not known apart"
        )


def _without(span: Span, summed: float) -> Span:
    """An update without the seconds in which gradients are added up."""
    if span.work != "update":
        return span
    return span._replace(ended=max(span.started, span.ended - summed))


def _moves(spans: Sequence[Span]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for span in spans:
        if span.work in ("begin_turn", "end_turn") and span.outcome == "done":
            found.setdefault(span.service, []).append(span.ended - span.started)
    return {service: statistics.median(each) for service, each in found.items()}


def _shards(spans: Sequence[Span]) -> int:
    """Pieces in which a version was published."""
    return 1 + max((int(s.unit[-1]) for s in spans if s.work == "shard" and s.unit), default=0)
