"""The driver in virtual time: results that are known in closed form, and durations that can be
recovered from a timeline.

No test starts a process.
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
from tests.cores import set_cores

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


def run_virtually(coroutine):
    with asyncio.Runner(loop_factory=clock.VirtualLoop) as runner:
        return runner.run(coroutine)


def test_waiting_in_virtual_time_takes_no_real_time():
    async def wait() -> tuple[float, float]:
        before = clock.now(), clock.wall()
        await asyncio.sleep(1e6)
        return clock.now() - before[0], clock.wall() - before[1]

    began = time.monotonic()
    assert run_virtually(wait()) == pytest.approx((1e6, 1e6))
    assert time.monotonic() - began < 60


def test_waiting_for_nothing_is_an_error():
    with pytest.raises(clock.Stuck, match="no timer is set"):
        run_virtually(asyncio.Event().wait())


@pytest.mark.parametrize(
    ("capacity", "together", "jobs", "ends"),
    [
        (1.0, 1.0, [(0.0, 1.0), (0.0, 1.0)], [2.0, 2.0]),
        (1.0, 1.0, [(0.0, 2.0), (1.0, 0.5)], [2.5, 2.0]),  # both run at half speed for one second
        (2.0, 0.8, [(0.0, 1.0), (0.0, 1.0)], [1.25, 1.25]),
        (2.0, 1.0, [(0.0, 1.0), (0.0, 1.0), (0.0, 1.0)], [1.5, 1.5, 1.5]),
        (2.0, 0.5, [(0.0, 1.0), (0.5, 1.0)], [1.5, 2.0]),
    ],
)
def test_users_of_a_shared_resource_slow_each_other(capacity, together, jobs, ends):
    async def go() -> tuple[list[float], float]:
        resource, result = SharedResource("part", capacity, together), [0.0] * len(jobs)
        for index, (_, seconds) in sorted(enumerate(jobs), key=lambda job: job[1][0]):
            await asyncio.sleep(jobs[index][0] - clock.now())
            resource.run(seconds, 1.0, lambda i=index: result.__setitem__(i, clock.now()))
        await asyncio.sleep(10)
        return result, resource.used()

    result, used = run_virtually(go())
    assert result == pytest.approx(ends) and used == pytest.approx(max(ends))


def arguments(method: Callable[..., object]) -> list[str]:
    """Return the argument names, without those that Ray adds to the methods of an actor class."""
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
def test_simulated_actors_have_the_arguments_of_real_actors(simulated, real):
    methods = [name for name, _ in inspect.getmembers(simulated, inspect.isfunction)]
    assert "ready" in methods
    for name in methods:
        if not name.startswith("_"):
            ours, theirs = (arguments(getattr(it, name)) for it in (simulated, real))
            assert ours == theirs, name


def test_iteration_on_one_gpu_is_the_sum_of_its_work():
    """All actors are on one GPU and calls need no time for transport, so the GPU is always busy."""
    actors_on_gpu = dict.fromkeys(("rollout", "learner", "reward", "encoder", "selector"), 1)
    hardware = Hardware({"one": DURATIONS}, [GpuAssignment("one", 1, actors_on_gpu)])
    result = simulate(config(actors=1), hardware)
    scored = PROMPTS * (3 * 0.01 + POOL * 0.002 + 0.01 + KEEP * 0.002)
    work = (
        PROMPTS * (3 * 0.3 + POOL * 0.05)
        + PROMPTS * (0.1 + KEEP * 0.2)
        + PROMPTS * KEEP * 0.25
        + scored
        + PROMPTS * (0.1 + 0.01)
        + (0.2 + 0.05 + 0.1)
    )
    assert result.iteration == pytest.approx(work) and result.work == pytest.approx(work)
    assert result.parts[0].idle == pytest.approx(0, abs=1e-9)
    assert result.update == pytest.approx(PROMPTS * KEEP * 0.25)
    path = critical_path(result.spans, result.spans_end)
    assert sum(path.values()) == pytest.approx(work, rel=1e-3)  # spans are rounded to four decimals
    assert path["update"] == pytest.approx(result.update, rel=1e-3)


def test_replicas_share_prompts_and_wait_for_each_other():
    """Every replica has its own GPU. The update takes the time of the replica with two prompts,
    plus the sums and the sending by the driver.
    """
    laid = [
        GpuAssignment("one", 3, {"learner": 1}),
        GpuAssignment("one", 1, {"rollout": 1, "reward": 1}),
    ]
    durations = replace(DURATIONS, summing=Summing(6, 0.3, 0.01), driver_s=0.001)
    run_config = config(actors=1, replicas=3)
    result = simulate(run_config, Hardware({"one": durations}, laid))
    # the samples of the busiest replica in each of the six steps of this update
    owner_of_sample = owners(PROMPTS, KEEP, 3, "prompts")
    seed = stream_seed(run_config.seed, "shuffle", 0)
    samples = StepAssignment.of(run_config.optimizer).busiest(owner_of_sample, seed)
    assert samples > 2 * KEEP
    sums = 6 * 2 * 2 * (0.1 + 0.01)
    # the driver sends to the three replicas one after the other, a millisecond each
    assert 0.001 <= result.update - samples * 0.25 - sums <= 0.003 + 1e-9
    assert result.driver == pytest.approx(0.001 * result.calls / result.iteration, rel=0.1)


def test_replicas_that_share_samples_work_equally_long():
    """Four prompts are divided among eight replicas: half a prompt each, in both stages."""
    laid = [
        GpuAssignment("one", 8, {"learner": 1}),
        GpuAssignment("one", 1, {"rollout": 1, "reward": 1}),
    ]
    run_config = config(actors=1)
    learner = run_config.services.learner.model_copy(update={"replicas": 8, "share": "samples"})
    run_config = run_config.model_copy(
        update={"services": run_config.services.model_copy(update={"learner": learner})}
    )
    even = run_config.optimizer.model_copy(update={"deal": "even"})
    run_config = run_config.model_copy(update={"optimizer": even})
    free_sums = replace(DURATIONS, summing=Summing(hop_s=0.0))
    result = simulate(run_config, Hardware({"one": free_sums}, laid))
    # 8 samples in 6 steps: no step has more than 2 of any 8 consecutive samples
    owner_of_sample = owners(PROMPTS, KEEP, 8, "samples")
    samples = StepAssignment.of(even).busiest(
        owner_of_sample, stream_seed(run_config.seed, "shuffle", 0)
    )
    assert KEEP / 2 < samples <= 12
    assert result.update == pytest.approx(samples * 0.25)
    two_steps = run_config.optimizer.model_copy(update={"steps_per_iteration": 2})
    run_config = run_config.model_copy(update={"optimizer": two_steps})
    result = simulate(run_config, Hardware({"one": free_sums}, laid))
    assert result.update == pytest.approx(KEEP / 2 * 0.25)
    parts = [span for span in result.spans if span.work == "regenerate"]
    assert sorted(span.unit[1:] for span in parts) == [(p, n) for p in range(4) for n in (0, 1)]
    assert all(abs(s.ended - s.started - (0.1 + KEEP / 2 * 0.2)) < 1e-3 for s in parts)


@pytest.mark.parametrize("actors", [4, 5])
def test_chunks_are_distributed_evenly_to_rollout_actors(actors):
    """Every iteration has four chunks, for actors that could take two each."""
    laid = [
        GpuAssignment("one", actors, {"rollout": 1}),
        GpuAssignment("one", 1, {"learner": 1, "reward": 1}),
    ]
    result = simulate(config(actors=actors, chunk=POOL), Hardware({"one": DURATIONS}, laid), 6)
    chunks = [span for span in result.timeline if span.work == "explore"]
    for iteration in range(6):
        actors_of_chunks = [span.actor for span in chunks if span.unit[0] == iteration]
        assert len(set(actors_of_chunks)) == len(actors_of_chunks) == 4, iteration


def test_actor_leaves_the_gpu_before_the_other_enters():
    """Two GPUs have a rollout actor and a learner replica each, which leave in 2 and 3 s. An
    iteration consists of exploring, two moves, all work of the learner, two moves, and loading.
    """
    laid = [
        GpuAssignment("one", 2, {"learner": 1, "rollout": 1}),
        GpuAssignment("one", 1, {"reward": 1}),
    ]
    moving = replace(DURATIONS, move={"rollout": 2.0, "learner": 3.0})
    both = config(2, 2, leaves=("rollout", "learner"))
    result = simulate(both, Hardware({"one": moving}, laid), 2)
    spans = sorted(result.timeline, key=lambda span: span.started)
    learning = ("regenerate", "update", "export", "audit")
    present: set[tuple[str, int]] = set()
    for span in spans:
        actor = (span.service, span.actor)
        if span.work == "begin_turn":
            present.add(actor)
            assert len({side for side, _ in present}) == 1, span
        if span.work in ("explore", "load", *learning):
            assert actor in present, span
        if span.work == "end_turn":
            assert all(
                s.ended <= span.started or s.started >= span.ended
                for s in spans
                if (s.service, s.actor) == actor and s is not span
            ), span
            present.discard(actor)
    without_moves = simulate(config(2, 2), Hardware({"one": DURATIONS}, laid), 2)
    assert not any(span.work.endswith("_turn") for span in without_moves.timeline)
    with_free_moves = simulate(both, Hardware({"one": DURATIONS}, laid), 2)
    # the last chunks of the four prompts are scored and selected while rollout actors leave
    upper_bound = with_free_moves.iteration + 2 * (2.0 + 3.0)
    assert (
        upper_bound - PROMPTS * (0.01 + CHUNK * 0.002 + 0.01)
        <= result.iteration
        <= upper_bound + 1e-9
    )


def test_exploring_ahead_hides_the_exploring_time():
    """Learner and rollout actor have their own GPUs, so an iteration takes the time of the learner,
    because exploring is shorter.
    """
    laid = [GpuAssignment("one", 1, {"learner": 1}), GpuAssignment("one", 1, {"rollout": 1})]
    times = [simulate(config(1, 1, ahead), Hardware({"one": DURATIONS}, laid)) for ahead in (0, 1)]
    learner = PROMPTS * (0.1 + KEEP * 0.2) + PROMPTS * KEEP * 0.25
    assert times[0].iteration > times[1].iteration >= learner
    # the rest is scoring and the last steps of publishing
    assert times[1].iteration == pytest.approx(learner, rel=0.05)


def test_prompts_are_encoded_in_advance():
    """The first prompts are encoded before the clock of the run starts, and the second during the
    first iteration. If encoding takes longer than an iteration, one of the two iterations takes as
    long as the encoding.
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


def test_durations_are_recovered_from_a_timeline():
    """Durations on two cores of speed 0.8 are known. They are measured from one layout, and other
    layouts are predicted correctly.
    """
    hardware = Hardware({"cores": DURATIONS}, cores=2.0, together=0.8)
    truth = simulate(config(), hardware, 2)
    # calibration ignores the first iteration of the timeline
    timeline = simulate(config(), hardware, 3).timeline
    actual = calibrate(config(), timeline, lambda span: "cores", 2.0)
    assert actual.together == pytest.approx(0.8, abs=0.011)
    assert actual.durations.explore.at(16) == pytest.approx(DURATIONS.explore.at(16), rel=0.02)
    assert actual.durations.explore.at(8) == pytest.approx(DURATIONS.explore.at(8), rel=0.02)
    assert actual.durations.update.at(64) == pytest.approx(DURATIONS.update.at(64), rel=0.02)
    model = measurements_from_spans(config(), timeline, [truth.iteration], cores=2)
    for shape in ((1, 1, 0, 16), (3, 1, 0, 8), (2, 2, 0, 16), (1, 1, 1, 16)):
        other = config(*shape)
        expected = simulate(other, hardware, 3).iteration
        assert model.predict(other).iteration == pytest.approx(expected, rel=0.02), shape


def test_plan_from_a_run_predicts_another_layout(tmp_path, capsys, monkeypatch):
    """The test writes a run directory of a simulated run on two cores and requests a plan for
    another layout.
    """
    set_cores(monkeypatch, 2)
    ran, hardware = config(), Hardware({"cores": DURATIONS}, cores=2.0, together=0.8)
    rundir = RunDirectory(tmp_path / "ran")
    rundir.create(ran)
    actual = simulate(ran, hardware, 3)
    for span in actual.timeline:
        Timeline(rundir.timeline_file).record(span)
    for index in range(3):
        row = {"kind": "iteration", "iteration": index, "time/iteration_s": actual.iteration}
        rundir.metric(row)
    other = config(actors=3, chunk=8)
    command = ["plan", str(write_toml(other, tmp_path)), "--from", str(rundir.path)]
    assert main([*command, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    expected = simulate(other, hardware, 3).iteration
    assert tree["iteration_s"] == pytest.approx(expected, rel=0.02)
    assert tree["bound_s"] < tree["iteration_s"] and tree["measured_s"] == actual.iteration
    assert main([*command, "--set", "explore.steps=7"]) == 2
    error = capsys.readouterr().err
    assert "the run has a different explore.steps" in error and error.count("\n") == 1
    rundir.event("replicas_changed", before=1, now=2, iteration=2)
    assert main(command) == 2
    assert "it was resumed with other replicas of the learner" in capsys.readouterr().err


def test_line_is_fitted_through_two_sizes():
    assert fitted({8: [0.7], 16: [1.1, 1.1, 9.0]}) == Line(pytest.approx(0.3), pytest.approx(0.05))
    assert fitted({16: [1.6]}) == Line(0.0, pytest.approx(0.1))
    # a disturbed measurement: a larger call is never shorter
    assert fitted({8: [2.0], 16: [1.0]}).fixed == 0


def test_calibration_without_updates_is_refused():
    with pytest.raises(ConfigError, match="no update after the first"):
        calibrate(config(), [], lambda span: "cores", 2.0)


def test_fetching_time_grows_with_the_logarithm_of_nodes():
    assert [fetching(25 * 10**9, nodes) for nodes in (1, 2, 8, 9)] == [0, 1, 3, 4]


@pytest.mark.parametrize(
    ("name", "gpus", "most"),
    [
        ("flux1-sol_rl-hpsv2", 8, 1.05),
        ("sana-naive_scaling-hpsv2", 4, 1.05),
        ("sana-sol_rl-hpsv2", 64, 1.30),  # an iteration takes only 6 s, so publishing is noticeable
    ],
)
def test_layout_search_predicts_the_simulated_time(name, gpus, most):
    """The search ignores publishing, sums and transfers, and assumes that GPUs have no gaps."""
    plan = make_plan(load(name, []), Assumptions(gpus=gpus))
    assert plan.scenarios is not None
    mine = plan.scenarios.mine
    result, searched = run(mine).iteration, mine.prediction.iteration
    assert 0.98 * searched <= result <= most * searched


def test_thresholds_of_the_audit_have_no_effect_on_random_rewards(capsys):
    """Simulated rewards do not agree: the monitor told of a misleading ranking, or chose a finer
    backend than "auto", which ended the plan with a traceback.
    """
    plain, audit = config(actors=1), {"patience": 1, "action": "finer_backend"}
    tree = plain.model_dump(mode="json")
    limited = parse(tree | {"audit": {**tree["audit"], "min_sign_agreement": 1.0, **audit}})
    actors_on_gpu = dict.fromkeys(("rollout", "learner", "reward", "encoder", "selector"), 1)
    hardware = Hardware({"one": DURATIONS}, [GpuAssignment("one", 1, actors_on_gpu)])
    assert simulate(limited, hardware).iteration == simulate(plain, hardware).iteration
    assert capsys.readouterr().out == ""
