"""The driver in virtual time: what is known in closed form, and what a timeline gives back.

Nothing starts a process here.
"""

import asyncio
import inspect
import json
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from actors.encoder import EncoderActor
from actors.learner import LearnerActor
from actors.reward import RewardActor
from actors.rollout import RolloutActor
from actors.selector import SelectorActor
from cli.main import main
from cluster.runtime import clock
from configs.load import ConfigError, load, parse
from learner.step_assignment import StepAssignment
from planning.assumptions import Assumptions
from planning.calibration import calibrate, fitted
from planning.durations import Durations, Line, Summing, fetching
from planning.layouts.gpus import GpuAssignment
from planning.plan import make_plan
from planning.waiting import owners
from policy.sampling.noise import stream_seed
from records.rundir import RunDirectory
from records.timeline import Timeline
from simulator import actors
from simulator.machine import SharedResource
from simulator.measured import measurements_from_spans
from simulator.outlook import critical_path, run
from simulator.run import simulate
from simulator.services import Hardware
from tests.cluster.runs import write_toml

DURATIONS = Durations(
    explore=Line(0.3, 0.05),
    generate=Line(0.1, 0.2),
    update=Line(0.0, 0.25),
    score={"reward": Line(0.01, 0.002)},
    encode=Line(0.0, 0.1),
    select=Line(0.01),
    export=Line(0.2),
    shard=Line(0.05),
    load=Line(0.1),
    call_s=0.0,
    driver_s=0.0,
)
PROMPTS, POOL, KEEP, CHUNK = 4, 40, 16, 16


def config(actors=2, replicas=1, ahead=0, chunk=CHUNK, leaves=()):
    tree = load("quickstart", []).model_dump(mode="json")
    tree["prompts"]["per_iteration"] = PROMPTS
    tree["explore"] |= {"pool_size": POOL, "chunk_size": chunk}
    tree["selection"]["keep"] = KEEP
    tree["audit"]["random_seeds"] = 0
    for kind in ("rollout", "reward", "encoder", "selector", "learner"):
        tree["services"][kind]["threads"] = 1
    tree["services"]["rollout"]["actors"] = actors
    tree["services"]["learner"]["replicas"] = replicas
    for kind in leaves:
        tree["services"][kind]["between_turns"] = "host"
    return parse(tree | {"explore_ahead": ahead})


def virtually(coroutine):
    with asyncio.Runner(loop_factory=clock.VirtualLoop) as runner:
        return runner.run(coroutine)


def test_waiting_takes_no_time():
    async def wait() -> tuple[float, float]:
        before = clock.now(), clock.wall()
        await asyncio.sleep(1e6)
        return clock.now() - before[0], clock.wall() - before[1]

    began = time.monotonic()
    assert virtually(wait()) == pytest.approx((1e6, 1e6))
    assert time.monotonic() - began < 60


def test_waiting_for_nothing_is_an_error():
    with pytest.raises(clock.Stuck, match="no timer is set"):
        virtually(asyncio.Event().wait())


@pytest.mark.parametrize(
    ("capacity", "together", "jobs", "ends"),
    [
        (1.0, 1.0, [(0.0, 1.0), (0.0, 1.0)], [2.0, 2.0]),
        (1.0, 1.0, [(0.0, 2.0), (1.0, 0.5)], [2.5, 2.0]),  # half speed for one second
        (2.0, 0.8, [(0.0, 1.0), (0.0, 1.0)], [1.25, 1.25]),
        (2.0, 1.0, [(0.0, 1.0), (0.0, 1.0), (0.0, 1.0)], [1.5, 1.5, 1.5]),
        (2.0, 0.5, [(0.0, 1.0), (0.5, 1.0)], [1.5, 2.0]),
    ],
)
def test_users_of_a_part_slow_each_other(capacity, together, jobs, ends):
    async def go() -> tuple[list[float], float]:
        part, found = SharedResource("part", capacity, together), [0.0] * len(jobs)
        for index, (_, seconds) in sorted(enumerate(jobs), key=lambda job: job[1][0]):
            await asyncio.sleep(jobs[index][0] - clock.now())
            part.run(seconds, 1.0, lambda i=index: found.__setitem__(i, clock.now()))
        await asyncio.sleep(10)
        return found, part.used()

    found, used = virtually(go())
    assert found == pytest.approx(ends) and used == pytest.approx(max(ends))


def arguments(method: Callable[..., object]) -> list[str]:
    """Names, without what Ray adds to the methods of a class that it has made an actor of."""
    return [name for name in inspect.signature(method).parameters if not name.startswith("_ray")]


@pytest.mark.parametrize(
    ("simulated", "real"),
    [
        (actors.Encoder, EncoderActor),
        (actors.Rollout, RolloutActor),
        (actors.Reward, RewardActor),
        (actors.Selector, SelectorActor),
        (actors.Learner, LearnerActor),
    ],
)
def test_simulated_actors_take_the_arguments_of_real_ones(simulated, real):
    methods = [name for name, _ in inspect.getmembers(simulated, inspect.isfunction)]
    assert "ready" in methods
    for name in methods:
        if not name.startswith("_"):
            ours, theirs = (arguments(getattr(it, name)) for it in (simulated, real))
            assert ours == theirs, name


def test_on_one_gpu_an_iteration_is_the_sum_of_its_work():
    """All actors on one GPU, and calls on their way for no time: somebody always works."""
    on_it = dict.fromkeys(("rollout", "learner", "reward", "encoder", "selector"), 1)
    hardware = Hardware({"one": DURATIONS}, [GpuAssignment("one", 1, on_it)])
    found = simulate(config(actors=1), hardware)
    scored = PROMPTS * (3 * 0.01 + POOL * 0.002 + 0.01 + KEEP * 0.002)
    work = (
        PROMPTS * (3 * 0.3 + POOL * 0.05)
        + PROMPTS * (0.1 + KEEP * 0.2)
        + PROMPTS * KEEP * 0.25
        + scored
        + PROMPTS * (0.1 + 0.01)
        + (0.2 + 0.05 + 0.1)
    )
    assert found.iteration == pytest.approx(work) and found.work == pytest.approx(work)
    assert found.parts[0].idle == pytest.approx(0, abs=1e-9)
    assert found.update == pytest.approx(PROMPTS * KEEP * 0.25)
    path = critical_path(found.spans, found.spans_end)
    assert sum(path.values()) == pytest.approx(work, rel=1e-3)  # spans have four decimals
    assert path["update"] == pytest.approx(found.update, rel=1e-3)


def test_replicas_share_prompts_and_wait_for_each_other():
    """On GPUs of their own: the replica with two prompts, the sums, and the driver's sending."""
    laid = [
        GpuAssignment("one", 3, {"learner": 1}),
        GpuAssignment("one", 1, {"rollout": 1, "reward": 1}),
    ]
    summed = replace(DURATIONS, summing=Summing(6, 0.3, 0.01), driver_s=0.001)
    requested = config(actors=1, replicas=3)
    found = simulate(requested, Hardware({"one": summed}, laid))
    # samples of the busiest replica of each of the six steps of this very update
    shared = owners(PROMPTS, KEEP, 3, "prompts")
    seed = stream_seed(requested.seed, "shuffle", 0)
    samples = StepAssignment.of(requested.optimizer).busiest(shared, seed)
    assert samples > 2 * KEEP
    sums = 6 * 2 * 2 * (0.1 + 0.01)
    # the three are sent theirs one after the other, a millisecond each
    assert 0.001 <= found.update - samples * 0.25 - sums <= 0.003 + 1e-9
    assert found.driver == pytest.approx(0.001 * found.calls / found.iteration, rel=0.1)


def test_replicas_that_share_samples_all_work_as_long():
    """Four prompts over eight replicas: half a prompt each, in both stages."""
    laid = [
        GpuAssignment("one", 8, {"learner": 1}),
        GpuAssignment("one", 1, {"rollout": 1, "reward": 1}),
    ]
    requested = config(actors=1)
    learner = requested.services.learner.model_copy(update={"replicas": 8, "share": "samples"})
    requested = requested.model_copy(
        update={"services": requested.services.model_copy(update={"learner": learner})}
    )
    even = requested.optimizer.model_copy(update={"deal": "even"})
    requested = requested.model_copy(update={"optimizer": even})
    free_sums = replace(DURATIONS, summing=Summing(hop_s=0.0))
    found = simulate(requested, Hardware({"one": free_sums}, laid))
    # 8 samples in 6 steps: of any 8 that follow each other no step has more than 2
    shared = owners(PROMPTS, KEEP, 8, "samples")
    samples = StepAssignment.of(even).busiest(shared, stream_seed(requested.seed, "shuffle", 0))
    assert KEEP / 2 < samples <= 12
    assert found.update == pytest.approx(samples * 0.25)
    two_steps = requested.optimizer.model_copy(update={"steps_per_iteration": 2})
    requested = requested.model_copy(update={"optimizer": two_steps})
    found = simulate(requested, Hardware({"one": free_sums}, laid))
    assert found.update == pytest.approx(KEEP / 2 * 0.25)
    parts = [span for span in found.spans if span.work == "regenerate"]
    assert sorted(span.unit[1:] for span in parts) == [(p, n) for p in range(4) for n in (0, 1)]
    assert all(abs(s.ended - s.started - (0.1 + KEEP / 2 * 0.2)) < 1e-3 for s in parts)


@pytest.mark.parametrize("actors", [4, 5])
def test_no_actor_explores_two_chunks_while_another_has_none(actors):
    """Four chunks for actors that take two each, in every iteration."""
    laid = [
        GpuAssignment("one", actors, {"rollout": 1}),
        GpuAssignment("one", 1, {"learner": 1, "reward": 1}),
    ]
    found = simulate(config(actors=actors, chunk=POOL), Hardware({"one": DURATIONS}, laid), 6)
    chunks = [span for span in found.timeline if span.work == "explore"]
    for iteration in range(6):
        who = [span.actor for span in chunks if span.unit[0] == iteration]
        assert len(set(who)) == len(who) == 4, iteration


def test_weights_leave_a_gpu_before_the_others_arrive():
    """Two actors on two GPUs each, which leave in 2 and 3 s: exploring, two moves, all that the
    learner does, two moves, loading.
    """
    laid = [
        GpuAssignment("one", 2, {"learner": 1, "rollout": 1}),
        GpuAssignment("one", 1, {"reward": 1}),
    ]
    moving = replace(DURATIONS, move={"rollout": 2.0, "learner": 3.0})
    both = config(2, 2, leaves=("rollout", "learner"))
    found = simulate(both, Hardware({"one": moving}, laid), 2)
    spans = sorted(found.timeline, key=lambda span: span.started)
    learning = ("regenerate", "update", "export", "audit")
    present: set[tuple[str, int]] = set()
    for span in spans:
        who = (span.service, span.actor)
        if span.work == "begin_turn":
            present.add(who)
            assert len({side for side, _ in present}) == 1, span
        if span.work in ("explore", "load", *learning):
            assert who in present, span
        if span.work == "end_turn":
            assert all(
                s.ended <= span.started or s.started >= span.ended
                for s in spans
                if (s.service, s.actor) == who and s is not span
            ), span
            present.discard(who)
    stayed = simulate(config(2, 2), Hardware({"one": DURATIONS}, laid), 2)
    assert not any(span.work.endswith("_turn") for span in stayed.timeline)
    free = simulate(both, Hardware({"one": DURATIONS}, laid), 2)
    # the last chunks of four prompts are scored and selected while rollout actors leave
    most = free.iteration + 2 * (2.0 + 3.0)
    assert most - PROMPTS * (0.01 + CHUNK * 0.002 + 0.01) <= found.iteration <= most + 1e-9


def test_exploring_ahead_hides_exploring():
    """With GPUs of their own an iteration is what the learner takes, exploring being shorter."""
    laid = [GpuAssignment("one", 1, {"learner": 1}), GpuAssignment("one", 1, {"rollout": 1})]
    times = [simulate(config(1, 1, ahead), Hardware({"one": DURATIONS}, laid)) for ahead in (0, 1)]
    learner = PROMPTS * (0.1 + KEEP * 0.2) + PROMPTS * KEEP * 0.25
    assert times[0].iteration > times[1].iteration >= learner
    # what stands in its way: scoring and the last steps of publishing
    assert times[1].iteration == pytest.approx(learner, rel=0.05)


def test_prompts_are_encoded_before_their_turn():
    """The first before the run's clock starts, the second beside the first iteration: of the two,
    one is as long as its encoding, if that is the longer.
    """
    laid = [
        GpuAssignment("one", 1, {"learner": 1, "rollout": 1}),
        GpuAssignment("one", 1, {"encoder": 1}),
    ]
    times = [
        simulate(config(1), Hardware({"one": replace(DURATIONS, encode=each)}, laid), 2).iteration
        for each in (Line(), Line(0.0, 1.0), Line(0.0, 20.0))
    ]
    assert times[1] == pytest.approx(times[0])
    assert times[2] == pytest.approx((times[0] + 20.0 * PROMPTS) / 2)


def test_durations_of_calls_are_recovered_from_a_timeline():
    """Known durations on two cores of 0.8: learned from one layout, others come out as they are."""
    hardware = Hardware({"cores": DURATIONS}, cores=2.0, together=0.8)
    truth = simulate(config(), hardware, 2)
    # the timeline leaves out the first iteration, by its number
    late = simulate(config(), hardware, 3).timeline
    found = calibrate(config(), late, lambda span: "cores", 2.0)
    assert found.together == pytest.approx(0.8, abs=0.011)
    assert found.durations.explore.at(16) == pytest.approx(DURATIONS.explore.at(16), rel=0.02)
    assert found.durations.explore.at(8) == pytest.approx(DURATIONS.explore.at(8), rel=0.02)
    assert found.durations.update.at(64) == pytest.approx(DURATIONS.update.at(64), rel=0.02)
    model = measurements_from_spans(config(), late, [truth.iteration], cores=2)
    for shape in ((1, 1, 0, 16), (3, 1, 0, 8), (2, 2, 0, 16), (1, 1, 1, 16)):
        other = config(*shape)
        expected = simulate(other, hardware, 3).iteration
        assert model.predict(other).iteration == pytest.approx(expected, rel=0.02), shape


def test_a_plan_from_a_run(tmp_path, capsys, monkeypatch):
    """A run directory as it would have been written on two cores; another layout is asked for."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    ran, hardware = config(), Hardware({"cores": DURATIONS}, cores=2.0, together=0.8)
    rundir = RunDirectory(tmp_path / "ran")
    rundir.create(ran)
    found = simulate(ran, hardware, 3)
    for span in found.timeline:
        Timeline(rundir.timeline_file).record(span)
    for index in range(3):
        row = {"kind": "iteration", "iteration": index, "time/iteration_s": found.iteration}
        rundir.metric(row)
    other = config(actors=3, chunk=8)
    command = ["plan", str(write_toml(other, tmp_path)), "--from", str(rundir.path)]
    assert main([*command, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    expected = simulate(other, hardware, 3).iteration
    assert tree["iteration_s"] == pytest.approx(expected, rel=0.02)
    assert tree["bound_s"] < tree["iteration_s"] and tree["measured_s"] == found.iteration
    assert main([*command, "--set", "explore.steps=7"]) == 2
    error = capsys.readouterr().err
    assert "the run has a different explore.steps" in error and error.count("\n") == 1


def test_a_line_through_two_sizes():
    assert fitted({8: [0.7], 16: [1.1, 1.1, 9.0]}) == Line(pytest.approx(0.3), pytest.approx(0.05))
    assert fitted({16: [1.6]}) == Line(0.0, pytest.approx(0.1))
    assert fitted({8: [2.0], 16: [1.0]}).fixed == 0  # disturbed: no call is shorter for more


def test_too_short_runs_are_refused():
    with pytest.raises(ConfigError, match="no update after the first"):
        calibrate(config(), [], lambda span: "cores", 2.0)


def test_nodes_forward_published_weights():
    assert [fetching(25 * 10**9, nodes) for nodes in (1, 2, 8, 9)] == [0, 1, 3, 4]


@pytest.mark.parametrize(
    ("name", "gpus", "most"),
    [
        ("flux1-sol_rl-hpsv2", 8, 1.05),
        ("sana-naive_scaling-hpsv2", 4, 1.05),
        ("sana-sol_rl-hpsv2", 64, 1.30),  # of 6 s, so that publishing counts
    ],
)
def test_the_layout_search_agrees_with_the_simulation(name, gpus, most):
    """The search knows no publishing, sums or transfers, and fills GPUs without gaps."""
    plan = make_plan(load(name, []), Assumptions(gpus=gpus))
    assert plan.scenarios is not None
    mine = plan.scenarios.mine
    found, searched = run(mine).iteration, mine.prediction.iteration
    assert 0.98 * searched <= found <= most * searched
