"""A learner on cores that regenerates with other threads than it trains with: what the simulation
says by hand, and what a timeline gives back.
"""

import pytest

from actors.messages import GenerateRequest
from cli.main import main
from configs.load import parse
from planning.calibration import calibrate, cores_of, uncontended_work
from planning.durations import Durations, Line
from planning.layouts.gpus import GpuAssignment
from records.rundir import RunDirectory
from records.timeline import Span, Timeline
from simulator.actors import Learner
from simulator.measured import measurements_from_spans
from simulator.run import Simulated, simulate
from simulator.services import Board, Hardware, SimulatedServices
from tests.cluster.runs import write_toml
from tests.simulator.test_simulator import DURATIONS, KEEP, POOL, config, virtually

TOGETHER = 0.8
PLAIN = Durations(
    explore=Line(4.0),
    generate=Line(6.0),
    update=Line(0.0, 8.0 / (2 * KEEP)),
    call_s=0.0,
    driver_s=0.0,
)
"""4 s to explore a prompt, 6 to regenerate it, 8 to train on two; nothing else takes time."""


def threaded(again, threads=2, audited=0, **shape):
    tree = config(**shape).model_dump(mode="json")
    tree["services"]["learner"] |= {"threads": threads, "regenerate_threads": again}
    tree["audit"]["random_seeds"] = audited
    return parse(tree)


def two_prompts(again, threads=2):
    tree = threaded(again, threads, actors=1, chunk=POOL).model_dump(mode="json")
    tree["prompts"]["per_iteration"] = 2
    return parse(tree)


def seconds(found: Simulated, work: str) -> list[float]:
    spans = [span for span in found.spans if span.work == work]
    return [span.ended - span.started for span in sorted(spans, key=lambda span: span.started)]


@pytest.mark.parametrize(
    ("threads", "again", "explored", "regenerated", "trained"),
    [
        # beside the second prompt's exploring, each has a core of 0.8: 5 s, in which 4 of 6 s of
        # regenerating are done; the last 2, and the second prompt, alone. Training has both cores
        (2, 1, 4 / 0.8, [4 / 0.8 + 2, 6.0], 8 / 0.8),
        # three threads for two cores: 0.8 * 2 / 3 of the speed for each
        (2, 2, 7.5, [7.5 + 2 / 0.8, 6 / 0.8], 8 / 0.8),
        (2, None, 7.5, [7.5 + 2 / 0.8, 6 / 0.8], 8 / 0.8),  # as many as train
        (1, 2, 7.5, [7.5 + 2 / 0.8, 6 / 0.8], 8.0),
        (1, None, 4 / 0.8, [4 / 0.8 + 2, 6.0], 8.0),
    ],
)
def test_two_prompts_on_two_cores(threads, again, explored, regenerated, trained):
    """One rollout actor explores a prompt, and then another, while the learner is at the first."""
    hardware = Hardware({"cores": PLAIN}, cores=2.0, together=TOGETHER)
    found = simulate(two_prompts(again, threads), hardware)
    assert seconds(found, "explore") == pytest.approx([4.0, explored], abs=1e-3)
    assert seconds(found, "regenerate") == pytest.approx(regenerated, abs=1e-3)
    assert seconds(found, "update") == pytest.approx([trained], abs=1e-3)
    assert found.iteration == pytest.approx(4.0 + sum(regenerated) + trained)
    assert found.work == pytest.approx(2 * 4.0 + 2 * 6.0 * (again or threads) + 8.0 * threads)


def test_on_gpus_threads_do_not_matter():
    laid = [GpuAssignment("one", 1, {"learner": 1, "rollout": 1})]
    both = [simulate(two_prompts(again), Hardware({"one": PLAIN}, laid)) for again in (1, 2)]
    # on one GPU somebody always works
    assert [each.iteration for each in both] == pytest.approx([2 * (4.0 + 6.0) + 8.0] * 2)


@pytest.mark.parametrize(
    ("cores", "weights", "expected"),
    [(2.0, None, 1.0), (2.0, "ema", None), (2.0, "base", None), (0.0, None, None)],
)
def test_evaluations_use_the_training_threads(cores, weights, expected):
    async def learner() -> Learner:
        board = Board(Hardware({"any": PLAIN}, cores=cores))
        services = SimulatedServices(threaded(1), board, lambda *args, **fields: None, print)
        made = services._simulated("learner", PLAIN, 0)
        assert isinstance(made, Learner)
        return made

    took = virtually(learner()).generate(GenerateRequest((1, 2), 2, None, weights), None)
    assert took.seconds == 6.0 and took.requested == expected


def span(service: str, work: str, started: float, ended: float) -> Span:
    return Span(service, 0, 0, work, (1, 0), None, 0, started, ended, "done")


@pytest.mark.parametrize(
    ("again", "beside", "audited"),
    [(1, 8.0, 10.0), (2, 8.0 * 2 / 3, 8.0), (None, 8.0 * 2 / 3, 8.0)],
)
def test_a_timeline_is_analyzed_with_the_threads_of_each_call(again, beside, audited):
    """Ten seconds each on two cores: beside exploring, and alone."""
    ran = threaded(again)
    together = [span("rollout", "explore", 0, 10), span("learner", "regenerate", 0, 10)]
    alone = [span("learner", "audit", 10, 20), span("learner", "evaluate", 20, 30)]
    spans = [*together, *alone, span("learner", "update", 30, 40)]
    done = uncontended_work(
        spans, lambda _: "cores", lambda each: cores_of(ran, each, 2.0), 2.0, TOGETHER
    )
    expected = [beside, beside, audited, 8.0, 8.0]
    assert [done[each] for each in spans] == pytest.approx(expected)


@pytest.mark.parametrize("audited", [0, 4])
@pytest.mark.parametrize(
    ("cores", "threads", "again"), [(2, 2, 1), (3, 1, 3), (4, 4, 2), (4, 2, 3), (4, 4, None)]
)
def test_durations_of_calls_are_recovered_from_a_timeline(cores, threads, again, audited):
    """As of one thread each: other layouts come out as they are, at the threads of the run."""
    hardware = Hardware({"cores": DURATIONS}, cores=float(cores), together=TOGETHER)
    ran = threaded(again, threads, audited)
    late = simulate(ran, hardware, 3)
    found = calibrate(ran, late.timeline, lambda each: "cores", float(cores))
    assert found.together == pytest.approx(TOGETHER, abs=0.011)
    assert found.durations.generate.at(KEEP) == pytest.approx(3.3, rel=0.02)
    assert found.durations.update.at(4 * KEEP) == pytest.approx(16.0, rel=0.02)
    assert found.durations.explore.at(16) == pytest.approx(1.1, rel=0.02)
    if audited:  # of fewer images, whose seconds are taken to be in proportion
        return
    model = measurements_from_spans(ran, late.timeline, [late.iteration], cores)
    for shape in ({"actors": 1}, {"actors": 3, "chunk": 8}, {"replicas": 2}):
        other = threaded(again, threads, **shape)
        expected = simulate(other, hardware, 3).iteration
        assert model.predict(other).iteration == pytest.approx(expected, rel=0.02), shape


@pytest.mark.parametrize("shape", [{"actors": 1}, {"actors": 3, "chunk": 8}, {"replicas": 2}])
def test_predictions_from_runs_with_busy_cores(shape):
    """The speed of cores that are busy together cannot be seen then, and hardly counts."""
    hardware = Hardware({"cores": DURATIONS}, cores=2.0, together=TOGETHER)
    late = simulate(threaded(2), hardware, 3)
    model = measurements_from_spans(threaded(2), late.timeline, [late.iteration], 2)
    assert model.hardware.together < 0.7
    other = threaded(2, **shape)
    expected = simulate(other, hardware, 3).iteration
    assert model.predict(other).iteration == pytest.approx(expected, rel=0.03)


def test_a_plan_from_a_run_keeps_its_threads(tmp_path, capsys, monkeypatch):
    """Or is refused: two threads that share cores wait for each other, for longer than is known."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    ran = threaded(1)
    found = simulate(ran, Hardware({"cores": DURATIONS}, cores=2.0, together=TOGETHER), 3)
    rundir = RunDirectory(tmp_path / "ran")
    rundir.create(ran)
    for each in found.timeline:
        Timeline(rundir.timeline_file).record(each)
    for index in range(3):
        row = {"kind": "iteration", "iteration": index, "time/iteration_s": found.iteration}
        rundir.metric(row)
    command = ["plan", str(write_toml(ran, tmp_path)), "--from", str(rundir.path)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert f"simulated   {found.iteration:.2f} s" in out
    assert "threads as in the run: learner 2, 1 while regenerating\n" in out
    for key, here, there in (("threads", 1, 2), ("regenerate_threads", 2, 1)):
        assert main([*command, "--set", f"services.learner.{key}={here}"]) == 2
        error = capsys.readouterr().err
        assert f"the run has services.learner.{key} = {there}, here it is {here}: its" in error
        assert error.count("\n") == 1
