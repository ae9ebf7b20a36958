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
from planning.calibration import calibrated
from planning.durations import Durations, Summing
from planning.layouts.gpus import Laid
from planning.layouts.scenario import Scenario
from policy.precision.accelerators import ACCELERATORS, accelerator_of
from records.rundir import RunDirectory
from records.timeline import Span, read_spans
from simulator.measured import (
    COUNT,
    iteration_seconds,
    simulated_json,
    simulated_lines,
    with_driver,
)
from simulator.outlook import run
from simulator.run import Simulated
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

    def predict(self, scenario: Scenario) -> Simulated:
        """Iterations in another layout on the same kind of GPU. Moves that the run did not make
        take what is counted.
        """
        counted = scenario.durations[self.gpus.kind]
        durations = replace(self.durations, move={**counted.move, **self.durations.move})
        return run(replace(scenario, durations={self.gpus.kind: durations}), COUNT)


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


def require_predictable(config: RunConfig, ran: RunConfig, scenario: Scenario | None) -> Scenario:
    """The scenario of ``config``. Raises ConfigError where a run ``ran`` does not tell its seconds:
    without a layout on GPUs, or where replicas share a base and there are more or fewer of them.
    """
    if scenario is None:
        raise ConfigError(f"--from: {config.name} has no layout on GPUs, as the run has")
    ours, theirs = (each.services.learner for each in (scenario.config, ran))
    if ours.shard != theirs.shard or (ours.shard == "base" and ours.replicas != theirs.replicas):
        raise ConfigError(
            f"--from: the run has {theirs.replicas} learner replicas with shard = {theirs.shard!r},"
            f" here there are {ours.replicas} with {ours.shard!r}: what they gather from each other"
            " is not known apart"
        )
    return scenario


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


def gpu_lines(found: Simulated, model: MeasuredOnGpus, name: str) -> list[str]:
    """What ``sol-rl plan --from`` adds."""
    return [
        *simulated_lines(found, "GPUs", name, model.spans, model.seconds),
        f"  assumed   {model.gpus.kind} and publishing as there; the layout as above, by what is"
        " counted, and so is adding up gradients; actors on one GPU take turns",
    ]


def gpu_json(scenario: Scenario, found: Simulated, model: MeasuredOnGpus) -> dict[str, object]:
    """What ``sol-rl plan --from --json`` prints."""
    count = sum(each.count for each in scenario.laid)
    where = {"mode": "by counted seconds", "gpus": count, "kinds": {model.gpus.kind: count}}
    return simulated_json(scenario.config, found, model.seconds, found.work / count, where)
