"""A plan from the run of another layout on GPUs. The runs are simulated, and no GPU is used."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cli.main import main
from configs.load import ConfigError, load
from configs.schema import RunConfig
from planning.assumptions import Assumptions
from planning.durations import Durations, Line, Summing
from planning.layouts.gpus import GpuAssignment
from planning.layouts.scenario import Scenario
from planning.plan import make_plan
from records.rundir import RunDirectory
from records.timeline import Span, Timeline
from simulator.measured_gpus import gpus_of_run, measured_on_gpus
from simulator.outlook import run
from simulator.run import simulate
from simulator.services import Hardware
from tests.simulator.test_simulator import DURATIONS, KEEP, config

PRESET = "sana-sol_rl-hpsv2"
FEWER = "prompts.per_iteration=16"
"""A third of the preset's prompts, so that a third of the calls are simulated."""


def record_run(
    path: Path,
    ran: RunConfig,
    laid: Sequence[GpuAssignment],
    spans: Sequence[Span],
    seconds: float,
    device: str = "NVIDIA H200",
    **without: str,
) -> RunDirectory:
    """Write a run directory with everything that a plan reads. Actors are on GPUs as in
    ``laid``.
    """
    rundir = RunDirectory(path)
    rundir.create(ran)
    gpus = [each.actors for each in laid for _ in range(each.count)]
    numbers: dict[str, int] = {}
    for index, actors in enumerate(gpus):
        for kind, count in actors.items():
            for _ in range(count):
                actor = numbers[kind] = numbers.get(kind, -1) + 1
                fields = {"device": device, "capability": "9.0", "gpu": f"GPU-{index}"}
                fields = {name: value for name, value in fields.items() if name not in without}
                rundir.event("actor_started", kind=kind, actor=actor, incarnation=0, **fields)
    rundir.event("actor_started", kind="selector", actor=0, incarnation=0)
    timeline = Timeline(rundir.timeline_file)
    for span in spans:
        timeline.record(span)
    timeline.write()
    for index in range(3):
        rundir.metric({"kind": "iteration", "iteration": index, "time/iteration_s": seconds})
    return rundir


def simulated_run(
    path: Path, durations: Durations, replicas: int = 2
) -> tuple[RunDirectory, float]:
    """Simulate and record a run: two GPUs have a rollout actor and a learner replica each, and a
    third has the scorer.
    """
    laid = [
        GpuAssignment("H200", 2, {"rollout": 1, "learner": 1}),
        GpuAssignment("H200", 1, {"reward": 1}),
    ]
    ran = config(2, replicas)
    result = simulate(ran, Hardware({"H200": durations}, laid), 3)
    return record_run(path, ran, laid, result.timeline, result.iteration), result.iteration


def test_durations_without_sharing_are_recovered_from_a_timeline(tmp_path):
    """Rollout actor and replica share a GPU, so most calls took longer than they would
    take alone.
    """
    summing = Summing(6, 0.06, 0.01)
    rundir, seconds = simulated_run(tmp_path / "run", replace(DURATIONS, summing=summing))
    gpus = gpus_of_run(rundir)
    assert gpus.kind == "H200" and sum(each.count for each in gpus.laid()) == 3
    model = measured_on_gpus(rundir, gpus, summing)
    assert model.seconds == pytest.approx(seconds)
    actual = model.durations
    for line, expected, count in (
        (actual.explore, DURATIONS.explore, 16),
        (actual.explore, DURATIONS.explore, 8),
        (actual.generate, DURATIONS.generate, KEEP),
        (actual.update, DURATIONS.update, 2 * KEEP),
        (actual.score["reward"], DURATIONS.score["reward"], 16),
        (actual.load, DURATIONS.load, 1),
        (actual.export, DURATIONS.export, 1),
    ):
        assert line.at(count) == pytest.approx(expected.at(count), rel=0.03)
    assert actual.summing == summing and actual.driver_s < 1e-3


def test_time_between_turns_is_measured(tmp_path):
    moving = replace(DURATIONS, move={"rollout": 2.0, "learner": 3.0})
    ran = config(2, 2, leaves=("rollout", "learner"))
    laid = [
        GpuAssignment("H200", 2, {"rollout": 1, "learner": 1}),
        GpuAssignment("H200", 1, {"reward": 1}),
    ]
    result = simulate(ran, Hardware({"H200": moving}, laid), 3)
    rundir = record_run(tmp_path / "run", ran, laid, result.timeline, result.iteration)
    model = measured_on_gpus(rundir, gpus_of_run(rundir), Summing())
    assert model.durations.move == pytest.approx(moving.move, rel=1e-3)


def slower(durations: Mapping[str, Durations], times: float) -> dict[str, Durations]:
    """Return the same durations, multiplied by ``times``."""

    def longer(line: Line) -> Line:
        return Line(times * line.fixed, times * line.each)

    lines = ("explore", "generate", "update", "encode", "export", "shard", "load")
    return {
        kind: replace(
            each,
            score={service: longer(line) for service, line in each.score.items()},
            **{name: longer(getattr(each, name)) for name in lines},
        )
        for kind, each in durations.items()
    }


@functools.cache
def scenario_on(count: int, *overrides: str) -> Scenario:
    plan = make_plan(load(PRESET, [FEWER, *overrides]), Assumptions(accelerator="H200", gpus=count))
    assert plan.scenarios is not None
    return plan.scenarios.mine


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory) -> RunDirectory:
    """A run of SANA on 4 H200 in which every call takes 1.5 times the predicted duration."""
    mine = scenario_on(4)
    mine = replace(mine, durations=slower(mine.durations, 1.5))
    result = run(mine, 3)
    path = tmp_path_factory.mktemp("gpus") / "run"
    return record_run(path, mine.config, mine.assigned, result.timeline, result.iteration)


def plan_command(rundir: RunDirectory, *arguments: str, overrides: Sequence[str] = ()) -> list[str]:
    changes = [part for each in (FEWER, *overrides) for part in ("--set", each)]
    return ["plan", PRESET, "--from", str(rundir.path), *arguments, *changes]


@pytest.mark.parametrize(("gpus", "overrides"), [(4, ()), (8, ()), (8, ("layout.mode=split",))])
def test_other_layouts_are_predicted_correctly(slow_run, gpus, overrides, capsys):
    """The plan does not know that calls are slower than predicted, except from the run."""
    expected = scenario_on(gpus, *overrides)
    expected = run(replace(expected, durations=slower(expected.durations, 1.5)), 3)
    assert main(plan_command(slow_run, "--gpus", str(gpus), "--json", overrides=overrides)) == 0
    actual = json.loads(capsys.readouterr().out)
    assert actual["iteration_s"] == pytest.approx(expected.iteration, rel=0.03)
    assert actual["layout"]["gpus"] == gpus and actual["layout"]["kinds"] == {"H200": gpus}
    assert 0.8 * actual["iteration_s"] < actual["bound_s"] <= actual["iteration_s"]
    # other arms would need calls that the run does not have
    assert list(actual["arms"]) == ["sol_rl"]
    assert actual["measured_s"] == pytest.approx(1.5 * scenario_on(4).prediction.iteration, rel=0.1)


def test_plan_prints_the_source_of_its_durations(slow_run, capsys):
    assert main(plan_command(slow_run, "--gpus", "8")) == 0
    out = capsys.readouterr().out
    assert "layout      shared on 8 x H200: the fastest by prediction" in out
    assert (
        "from        durations of calls are those of run (" in out
        and "calls on 4 x H200, in" in out
    )
    assert "arms        on" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--accelerator", "B200"], "--accelerator B200: the run of --from was on H200"),
        (["--set", "explore.steps=4"], "the run has a different explore.steps"),
        (["--set", "learner.nothing=1"], "learner"),
    ],
)
def test_settings_that_the_run_cannot_predict_are_refused_in_one_line(
    slow_run, capsys, arguments, message
):
    assert main(plan_command(slow_run, *arguments)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_plan_on_cores_from_a_run_on_gpus_is_refused(slow_run, capsys):
    assert main(["plan", "quickstart", "--from", str(slow_run.path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_incomplete_or_mixed_events_are_refused(tmp_path):
    ran, laid = config(1), [GpuAssignment("H200", 1, {"rollout": 1, "learner": 1, "reward": 1})]
    earlier = record_run(tmp_path / "earlier", ran, laid, [], 1.0, gpu="")
    with pytest.raises(ConfigError, match="do not contain the GPUs of actors"):
        gpus_of_run(earlier)
    unknown = record_run(tmp_path / "unknown", ran, laid, [], 1.0, device="NVIDIA X1")
    with pytest.raises(ConfigError, match="nothing is known of the GPU 'NVIDIA X1'"):
        gpus_of_run(unknown)
    mixed = record_run(tmp_path / "mixed", ran, laid, [], 1.0)
    fields = {"device": "NVIDIA B200", "capability": "10.0", "gpu": "GPU-9"}
    mixed.event("actor_added", kind="rollout", actor=1, incarnation=0, **fields)
    with pytest.raises(
        ConfigError, match="were on NVIDIA B200 and NVIDIA H200: --from supports one kind"
    ):
        gpus_of_run(mixed)


def test_run_with_a_shared_base_is_refused(slow_run, capsys):
    overrides = ("services.learner.shard=base", "regenerate.compile=false")
    assert main(plan_command(slow_run, "--gpus", "4", overrides=overrides)) == 2
    assert capsys.readouterr().err.count("\n") == 1
