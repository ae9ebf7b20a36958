"""A learner on CPU cores that regenerates with another number of threads than it trains with: the
simulation is compared with a manual calculation, and durations are recovered from a timeline.
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
from tests.cores import set_cores
from tests.simulator.test_simulator import DURATIONS, KEEP, POOL, config, run_virtually

TOGETHER = 0.8
PLAIN = Durations(
    explore=Line(4.0),
    generate=Line(6.0),
    update=Line(0.0, 8.0 / (2 * KEEP)),
    call_s=0.0,
    driver_s=0.0,
)
"""Exploring a prompt takes 4 s, regenerating it 6 s, and training on two 8 s. Nothing else takes
time.
"""


def threaded(regenerate_threads, threads=2, audited=0, **shape):
    tree = config(**shape).model_dump(mode="json")
    tree["services"]["learner"] |= {"threads": threads, "regenerate_threads": regenerate_threads}
    tree["audit"]["random_seeds"] = audited
    return parse(tree)


def two_prompts(regenerate_threads, threads=2):
    tree = threaded(regenerate_threads, threads, actors=1, chunk=POOL).model_dump(mode="json")
    tree["prompts"]["per_iteration"] = 2
    return parse(tree)


def seconds(result: Simulated, work: str) -> list[float]:
    spans = [span for span in result.spans if span.work == work]
    return [span.ended - span.started for span in sorted(spans, key=lambda span: span.started)]


@pytest.mark.parametrize(
    ("threads", "regenerate_threads", "explored", "regenerated", "trained"),
    [
        # while the second prompt is explored, each actor has a core of speed 0.8. This takes 5 s,
        # in which 4 of 6 s of regeneration are done. The last 2 s and the second prompt run alone.
        # Training uses both cores
        (2, 1, 4 / 0.8, [4 / 0.8 + 2, 6.0], 8 / 0.8),
        # three threads share two cores, so each has 0.8 * 2 / 3 of the speed
        (2, 2, 7.5, [7.5 + 2 / 0.8, 6 / 0.8], 8 / 0.8),
        (2, None, 7.5, [7.5 + 2 / 0.8, 6 / 0.8], 8 / 0.8),  # as many threads as for training
        (1, 2, 7.5, [7.5 + 2 / 0.8, 6 / 0.8], 8.0),
        (1, None, 4 / 0.8, [4 / 0.8 + 2, 6.0], 8.0),
    ],
)
def test_two_prompts_on_two_cores_match_a_manual_calculation(
    threads, regenerate_threads, explored, regenerated, trained
):
    """One rollout actor explores a prompt and then another, while the learner works on
    the first.
    """
    hardware = Hardware({"cores": PLAIN}, cores=2.0, together=TOGETHER)
    result = simulate(two_prompts(regenerate_threads, threads), hardware)
    assert seconds(result, "explore") == pytest.approx([4.0, explored], abs=1e-3)
    assert seconds(result, "regenerate") == pytest.approx(regenerated, abs=1e-3)
    assert seconds(result, "update") == pytest.approx([trained], abs=1e-3)
    assert result.iteration == pytest.approx(4.0 + sum(regenerated) + trained)
    assert result.work == pytest.approx(
        2 * 4.0 + 2 * 6.0 * (regenerate_threads or threads) + 8.0 * threads
    )


def test_threads_do_not_matter_on_gpus():
    laid = [GpuAssignment("one", 1, {"learner": 1, "rollout": 1})]
    both = [
        simulate(two_prompts(regenerate_threads), Hardware({"one": PLAIN}, laid))
        for regenerate_threads in (1, 2)
    ]
    # the GPU is always busy
    assert [each.iteration for each in both] == pytest.approx([2 * (4.0 + 6.0) + 8.0] * 2)


@pytest.mark.parametrize(
    ("cores", "weights", "expected"),
    [(2.0, None, 1.0), (2.0, "ema", None), (2.0, "base", None), (0.0, None, None)],
)
def test_held_out_images_use_the_training_threads(cores, weights, expected):
    async def make_learner() -> Learner:
        board = Board(Hardware({"any": PLAIN}, cores=cores))
        services = SimulatedServices(threaded(1), board, lambda *args, **fields: None, print)
        learner = services._simulated("learner", PLAIN, 0)
        assert isinstance(learner, Learner)
        return learner

    work = run_virtually(make_learner()).generate(GenerateRequest((1, 2), 2, None, weights), None)
    assert work.seconds == 6.0 and work.requested == expected


def span(service: str, work: str, started: float, ended: float) -> Span:
    return Span(service, 0, 0, work, (1, 0), None, 0, started, ended, "done")


@pytest.mark.parametrize(
    ("regenerate_threads", "shared", "audited"),
    [(1, 8.0, 10.0), (2, 8.0 * 2 / 3, 8.0), (None, 8.0 * 2 / 3, 8.0)],
)
def test_uncontended_work_uses_the_threads_of_each_call(regenerate_threads, shared, audited):
    """Each call takes ten seconds on two cores, during exploring or alone."""
    ran = threaded(regenerate_threads)
    together = [span("rollout", "explore", 0, 10), span("learner", "regenerate", 0, 10)]
    alone = [span("learner", "audit", 10, 20), span("learner", "evaluate", 20, 30)]
    spans = [*together, *alone, span("learner", "update", 30, 40)]
    done = uncontended_work(
        spans, lambda _: "cores", lambda each: cores_of(ran, each, 2.0), 2.0, TOGETHER
    )
    expected = [shared, shared, audited, 8.0, 8.0]
    assert [done[each] for each in spans] == pytest.approx(expected)


@pytest.mark.parametrize("audited", [0, 4])
@pytest.mark.parametrize(
    ("cores", "threads", "regenerate_threads"),
    [(2, 2, 1), (3, 1, 3), (4, 4, 2), (4, 2, 3), (4, 4, None)],
)
def test_durations_are_recovered_from_a_timeline(cores, threads, regenerate_threads, audited):
    """Durations are recovered as for one thread each. Other layouts with the thread counts of the
    run are predicted correctly.
    """
    hardware = Hardware({"cores": DURATIONS}, cores=float(cores), together=TOGETHER)
    ran = threaded(regenerate_threads, threads, audited)
    simulated = simulate(ran, hardware, 3)
    actual = calibrate(ran, simulated.timeline, lambda each: "cores", float(cores))
    assert actual.together == pytest.approx(TOGETHER, abs=0.011)
    assert actual.durations.generate.at(KEEP) == pytest.approx(3.3, rel=0.02)
    assert actual.durations.update.at(4 * KEEP) == pytest.approx(16.0, rel=0.02)
    assert actual.durations.explore.at(16) == pytest.approx(1.1, rel=0.02)
    if audited:  # audits have fewer images, whose time is assumed to be proportional
        return
    model = measurements_from_spans(ran, simulated.timeline, [simulated.iteration], cores)
    for shape in ({"actors": 1}, {"actors": 3, "chunk": 8}, {"replicas": 2}):
        other = threaded(regenerate_threads, threads, **shape)
        expected = simulate(other, hardware, 3).iteration
        assert model.predict(other).iteration == pytest.approx(expected, rel=0.02), shape


@pytest.mark.parametrize("shape", [{"actors": 1}, {"actors": 3, "chunk": 8}, {"replicas": 2}])
def test_predictions_if_cores_are_never_used_alone(shape):
    """In this case the combined speed of busy cores cannot be measured, but it hardly affects the
    prediction.
    """
    hardware = Hardware({"cores": DURATIONS}, cores=2.0, together=TOGETHER)
    simulated = simulate(threaded(2), hardware, 3)
    model = measurements_from_spans(threaded(2), simulated.timeline, [simulated.iteration], 2)
    assert model.hardware.together < 0.7
    other = threaded(2, **shape)
    expected = simulate(other, hardware, 3).iteration
    assert model.predict(other).iteration == pytest.approx(expected, rel=0.03)


def test_plan_from_a_run_keeps_its_threads(tmp_path, capsys, monkeypatch):
    """A plan with other thread counts is refused, because the waiting of threads that share cores
    is not known.
    """
    set_cores(monkeypatch, 2)
    ran = threaded(1)
    result = simulate(ran, Hardware({"cores": DURATIONS}, cores=2.0, together=TOGETHER), 3)
    rundir = RunDirectory(tmp_path / "ran")
    rundir.create(ran)
    for each in result.timeline:
        Timeline(rundir.timeline_file).record(each)
    for index in range(3):
        row = {"kind": "iteration", "iteration": index, "time/iteration_s": result.iteration}
        rundir.metric(row)
    command = ["plan", str(write_toml(ran, tmp_path)), "--from", str(rundir.path)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert f"simulated   {result.iteration:.2f} s" in out
    assert "threads as in the run: learner 2, 1 while regenerating\n" in out
    for key, requested, recorded in (("threads", 1, 2), ("regenerate_threads", 2, 1)):
        assert main([*command, "--set", f"services.learner.{key}={requested}"]) == 2
        error = capsys.readouterr().err
        assert (
            f"the run has services.learner.{key} = {recorded}, here it is {requested}: its" in error
        )
        assert error.count("\n") == 1
