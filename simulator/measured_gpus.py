"""``sol-rl plan CONFIG --from RUN``, with durations of calls measured in a run on GPUs of one kind.

Actors that shared a GPU are assumed to have taken turns on it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from configs.load import ConfigError
from configs.schema import RunConfig
from planning.assumptions import Assumptions
from planning.calibration import calibrate
from planning.durations import Durations, Summing
from planning.layouts.gpus import GpuAssignment
from planning.placement import Node
from planning.plan import Plan, make_plan
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
    """The GPU (by UUID) of each process of a run, and the kind of all these GPUs."""

    kind: str
    of: Mapping[Process, str]

    def part_of(self, span: Span) -> str:
        """Return the GPU that a call used; for an actor without one, the name of the actor."""
        return self.of.get((span.service, span.actor, span.incarnation), span.who)

    def laid(self) -> list[GpuAssignment]:
        """Return the GPUs with the actors that were on them when the run began."""
        actors: dict[str, Counter[str]] = {}
        for (service, _, incarnation), gpu in self.of.items():
            if incarnation == 0:
                actors.setdefault(gpu, Counter())[service] += 1
        return [GpuAssignment(self.kind, 1, dict(each)) for each in actors.values()]


def gpus_of_run(rundir: RunDirectory) -> RunGpus:
    """Read the GPUs of a run from its events.

    Raises ConfigError, with one line, if the events do not name them, or if they are not all of one
    known kind.
    """
    where = f"--from {rundir.path}"
    of: dict[Process, str] = {}
    names: set[str] = set()
    for row in rundir.events():
        if row.get("event") not in JOINS or "capability" not in row:
            continue
        if "gpu" not in row:
            raise ConfigError(
                f"{where}: its events do not contain the GPUs of actors, because an earlier"
                " version of Sol-RL wrote them: train for a few iterations with this version"
            )
        names.add(str(row["device"]))
        of[str(row["kind"]), int(row["actor"]), int(row["incarnation"])] = str(row["gpu"])
    if len(names) != 1:
        kinds = " and ".join(sorted(names)) or "no GPU"
        raise ConfigError(f"{where}: its actors were on {kinds}: --from supports one kind of GPU")
    (name,) = names
    known = accelerator_of(name)
    if known is None:
        listed = ", ".join(ACCELERATORS)
        raise ConfigError(f"{where}: nothing is known of the GPU {name!r} (known: {listed})")
    return RunGpus(next(kind for kind, each in ACCELERATORS.items() if each is known), of)


@dataclass(frozen=True)
class MeasuredOnGpus:
    """A run on GPUs: the durations of its calls, and the median seconds of its iterations."""

    durations: Durations
    gpus: RunGpus
    seconds: float
    spans: int

    def line(self, name: str) -> str:
        """Return the line of a plan that says that its durations come from the run ``name``."""
        count = sum(each.count for each in self.gpus.laid())
        return (
            f"from        durations of calls are those of {name} ({self.spans} calls on {count} x"
            f" {self.gpus.kind}, in iterations of {self.seconds:.2f} s), and so is publishing;"
            " operations and summing of gradients are counted"
        )


def measured_on_gpus(rundir: RunDirectory, gpus: RunGpus, summing: Summing) -> MeasuredOnGpus:
    """Read the measurements of a run on GPUs from its directory.

    ``summing`` is the computed time of summing gradients, which a timeline does not separate from
    training. Raises ConfigError if the run has no iteration or update after the first.
    """
    config, seconds = rundir.configuration(), statistics.median(iteration_seconds(rundir))
    spans = read_spans(rundir.timeline_file)
    summed = summing.at(config.services.learner.replicas)
    calibration = calibrate(config, [_without(span, summed) for span in spans], gpus.part_of, 1.0)
    durations = replace(calibration.durations, summing=summing, move=_moves(spans))
    hardware = Hardware({gpus.kind: durations}, gpus.laid(), shards=_shards(spans))
    fitted = with_driver(config, hardware, seconds).any_durations
    return MeasuredOnGpus(fitted, gpus, seconds, calibration.spans)


def plan_from(
    config: RunConfig, rundir: RunDirectory, given: Assumptions, nodes: Sequence[Node] | None
) -> tuple[Plan, MeasuredOnGpus]:
    """Return (plan of ``config`` with call durations of a run on GPUs, measurements of that run).

    Raises ConfigError, with one line, if the durations cannot be derived from the run.
    """
    gpus, ran = gpus_of_run(rundir), rundir.configuration()
    if given.accelerator not in (None, gpus.kind):
        raise ConfigError(
            f"--accelerator {given.accelerator}: the run of --from was on {gpus.kind}, so"
            " durations on other GPUs are unknown"
        )
    config = _recomputing_as(config, ran)
    require_same(config, ran)
    given = replace(given, accelerator=gpus.kind)
    # a first plan with computed durations supplies the time of summing gradients
    counted = make_plan(config, given, nodes).scenarios
    if counted is None:
        raise ConfigError(f"--from: {config.name} has no layout on GPUs, but the run has one")
    model = measured_on_gpus(rundir, gpus, counted.mine.durations[gpus.kind].summing)
    plan = make_plan(config, replace(given, measured={gpus.kind: model.durations}), nodes)
    _require_as_many_sharing(plan.config, ran)
    return plan, model


def _recomputing_as(config: RunConfig, ran: RunConfig) -> RunConfig:
    """Return ``config`` with the run's share of recomputed blocks if it is left to be chosen."""
    if config.optimizer.gradient_checkpointing != "auto":
        return config
    share = {"gradient_checkpointing": ran.optimizer.gradient_checkpointing}
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update=share)})


def _require_as_many_sharing(config: RunConfig, ran: RunConfig) -> None:
    """Raise ConfigError if sharding of the base, or the number of its shards, differs from the run.

    The time of gathering depends on both and is not measured separately.
    """
    own, other = (each.services.learner for each in (config, ran))
    if own.shard != other.shard or (own.shard == "base" and own.replicas != other.replicas):
        raise ConfigError(
            f"--from: the run has {other.replicas} learner replicas with shard = {other.shard!r},"
            f" here there are {own.replicas} with {own.shard!r}: the time of gathering weights was"
            " not measured separately"
        )


def _without(span: Span, summed: float) -> Span:
    """Return the span of an update without the seconds of summing gradients; others unchanged."""
    if span.work != "update":
        return span
    return span._replace(ended=max(span.started, span.ended - summed))


def _moves(spans: Sequence[Span]) -> dict[str, float]:
    """Return the median seconds in which weights leave a GPU or return, by service."""
    seconds: dict[str, list[float]] = {}
    for span in spans:
        if span.work in ("begin_turn", "end_turn") and span.outcome == "done":
            seconds.setdefault(span.service, []).append(span.ended - span.started)
    return {service: statistics.median(values) for service, values in seconds.items()}


def _shards(spans: Sequence[Span]) -> int:
    """Return the number of shards in which a version was published."""
    return 1 + max((int(s.unit[-1]) for s in spans if s.work == "shard" and s.unit), default=0)
