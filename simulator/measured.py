"""``sol-rl plan CONFIG --from RUN``: simulate with call durations measured in a run on cores."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from configs.load import ConfigError
from configs.schema import RunConfig
from configs.training import Optimizer
from planning.calibration import calibrate
from planning.machine import usable_cores
from planning.placement import kinds_of, needs_of
from records.rundir import RunDirectory
from records.timeline import Span, read_spans
from simulator.outlook import critical_path
from simulator.run import Simulated, simulate
from simulator.services import Hardware

COUNT = 3
"""Iterations over which a prediction is averaged."""
TRIES = 12
MOST_DRIVER_S = 0.05


@dataclass(frozen=True)
class Measured:
    """A run on cores: the durations of its calls, and the median seconds of its iterations."""

    hardware: Hardware
    seconds: float
    spans: int

    def predict(self, config: RunConfig) -> Simulated:
        """Simulate a run of another size or layout on the same cores."""
        return simulate(config, self.hardware, COUNT)


def measured(rundir: RunDirectory, cores: int | None = None) -> Measured:
    """Read the measurements of a run on cores from its directory.

    Raises ConfigError if it has no iteration or update after the first.
    """
    seconds = iteration_seconds(rundir)
    return measurements_from_spans(
        rundir.configuration(), read_spans(rundir.timeline_file), seconds, cores
    )


def iteration_seconds(rundir: RunDirectory) -> list[float]:
    """Return the seconds of all iterations but the first.

    Raises ConfigError if there is none, or if not all had the same number of replicas.
    """
    if any(event["event"] == "replicas_changed" for event in rundir.events()):
        raise ConfigError(
            f"--from {rundir.path}: it was resumed with other replicas of the learner, so its"
            " updates are not of one size"
        )
    rows = [row for row in rundir.metrics() if row.get("kind") == "iteration"]
    seconds = [float(row["time/iteration_s"]) for row in rows[1:]]
    if not seconds:
        raise ConfigError(f"--from {rundir.path}: it has only one iteration")
    return seconds


def measurements_from_spans(
    config: RunConfig, spans: Sequence[Span], seconds: Sequence[float], cores: int | None = None
) -> Measured:
    """Calibrate from the spans of a run on cores and the ``seconds`` of its later iterations.

    ``cores`` is the number of cores of the run; None: that of this machine.
    """
    capacity = float(cores or usable_cores())
    calibration = calibrate(config, spans, lambda span: "cores", capacity)
    hardware = Hardware(
        {"cores": calibration.durations}, cores=capacity, together=calibration.together
    )
    goal = statistics.median(seconds)
    return Measured(with_driver(config, hardware, goal), goal, calibration.spans)


def with_driver(config: RunConfig, hardware: Hardware, goal: float) -> Hardware:
    """Return ``hardware`` with the driver's seconds per call fitted to the run's iterations.

    They are found by bisection in 0 .. ``MOST_DRIVER_S``, so that the simulation of the run itself
    takes ``goal`` seconds per iteration.
    """

    def at(driver_s: float) -> Hardware:
        durations = hardware.durations.items()
        changed = {kind: replace(each, driver_s=driver_s) for kind, each in durations}
        return replace(hardware, durations=changed)

    low, high = 0.0, MOST_DRIVER_S
    for _ in range(TRIES):
        middle = (low + high) / 2
        if simulate(config, at(middle), COUNT).iteration < goal:
            low = middle
        else:
            high = middle
    return at(low)


SAME = (
    "model",
    "arm",
    "objective",
    "explore.steps",
    "explore.solver",
    "explore.paths",
    "explore.backend",
    "explore.compile",
    "regenerate",
    "optimizer",
    "lora",
    "rewards",
)
"""Settings, besides sizes and layout, that the durations of calls depend on."""


def require_same(config: RunConfig, run: RunConfig) -> None:
    """Raise ConfigError, with one line, if calls of ``config`` and of the run last differently."""
    # durations do not depend on which samples an optimizer step gets
    optimizer = run.optimizer.model_copy(update={"deal": config.optimizer.deal})
    both = [each.model_dump(mode="json") for each in (config, _with(run, optimizer))]
    for key in SAME:
        value, other = both
        for name in key.split("."):
            value, other = value[name], other[name]
        if value != other:
            raise ConfigError(
                f"--from: the run has a different {key}: only sizes and layouts may differ"
            )
    if on_gpus(run):
        return
    other = _threads(run, kinds_of(config))
    for key, threads in _threads(config, kinds_of(config)).items():
        if threads != other[key]:
            raise ConfigError(
                f"--from: the run has {key} = {other[key]}, here it is {threads}: its timeline has"
                " no durations for other numbers of threads"
            )


def on_gpus(run: RunConfig) -> bool:
    """Return True if any actor of a run has a share of a GPU."""
    return any(need.gpus for need in needs_of(run))


def _with(run: RunConfig, optimizer: Optimizer) -> RunConfig:
    return run.model_copy(update={"optimizer": optimizer})


def _threads(config: RunConfig, kinds: Sequence[str]) -> dict[str, int]:
    """Return the numbers of threads of calls, by configuration key.

    Durations for other numbers cannot be derived: one thread does not take twice as long as two,
    because threads wait for each other, especially on shared cores.
    """
    threads = {f"services.{kind}.threads": config.services.of(kind).threads for kind in kinds}
    if config.plan.regenerate:
        threads["services.learner.regenerate_threads"] = (
            config.services.learner.regeneration_threads
        )
    return threads


def measured_lines(config: RunConfig, found: Simulated, model: Measured, name: str) -> list[str]:
    """Return the lines that ``sol-rl plan --from`` adds."""
    idle = ", ".join(f"{kind} {share:.0%}" for kind, share in found.idle.items())
    path = critical_path(found.spans, found.spans_end)
    chain = ", ".join(f"{work} {each:.2f} s" for work, each in path.items())
    learner = config.services.learner
    threads = f"learner {learner.threads}"
    if config.plan.regenerate:
        threads += f", {learner.regeneration_threads} while regenerating"
    return [
        "",
        f"simulated   {found.iteration:.2f} s per iteration, with the durations of calls in {name}"
        f" ({model.spans} calls; its iterations took {model.seconds:.2f} s)",
        f"  idle      cores {found.mean_idle:.0%} without any work; of their time, actors: {idle}",
        f"  critical  {chain}",
        f"  assumed   {model.hardware.cores:g} cores, each at {model.hardware.together:.0%} of its"
        f" speed while all are busy, as measured in the run; threads as in the run: {threads}",
    ]


def measured_json(config: RunConfig, found: Simulated, model: Measured) -> dict[str, object]:
    """Return what ``sol-rl plan --from --json`` prints."""
    hardware = model.hardware
    return {
        "name": config.name,
        "arm": config.arm,
        "iteration_s": found.iteration,
        "bound_s": found.work / (hardware.cores * hardware.together),
        "layout": {
            "mode": "by hand",
            "cores": hardware.cores,
            "explore_ahead": config.explore_ahead,
            "services": {kind: config.services.of(kind).count for kind in kinds_of(config)},
        },
        "idle_share": dict(found.idle),
        "arms": {config.arm: found.iteration},
        "critical_path_s": critical_path(found.spans, found.spans_end),
        "measured_s": model.seconds,
    }
