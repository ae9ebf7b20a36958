"""Pools that change size while they work.

Invariants: every task is answered once, none is lost or repeated; results do not depend on when the
pool grew or shrank.
"""

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from actors.calls import Task
from cluster.driver.autoscale import Autoscaler, Load, size_for, verdict
from cluster.driver.scaling import Scaling
from cluster.jobs.board import board
from cluster.runtime.pool import ActorPool
from configs.load import load
from configs.services import Autoscale, Service
from records.errors import RunFailed
from records.progress import Progress
from records.rundir import RunDirectory
from tests.cluster.echo import Echo, Pool
from tests.cluster.runs import adapters, run_here, selections, tiny_config


def test_a_pool_scales_under_load_and_every_task_counts_once(ray_here, tmp_path):
    harness, path = Pool(1, str(tmp_path / "units"), in_flight=2), tmp_path / "units"
    sizes = []

    async def work(pool: ActorPool) -> list[Any]:
        answers: list[Any] = []
        going, numbers = True, itertools.count()

        async def keep_one_in_flight() -> None:
            while going:
                number = next(numbers)
                answers.append(await pool.call(Task(number), Echo.work, number))

        hands = [asyncio.create_task(keep_one_in_flight()) for _ in range(9)]
        for size in (3, 1, 2):
            await pool.supervisor.resize(size)
            sizes.append((pool.alive, len(pool.members)))
            done = len(answers)
            while len(answers) < done + 20:  # every actor gets some
                await asyncio.sleep(0.02)
        going = False
        await asyncio.gather(*hands)
        return sorted(answers)

    answers = harness.run(work)
    assert sizes == [(3, 3), (1, 1), (2, 2)]
    assert [unit for unit, _ in answers] == list(range(len(answers)))
    # none twice
    assert sorted(int(line) for line in path.read_text().split()) == list(range(len(answers)))
    assert harness.pool.reissued == 0
    assert len({pid for _, pid in answers}) == 4  # actor 0; 1 and 2; 3
    named = {
        kind: [fields["actor"] for name, fields in harness.events if name == kind]
        for kind in ("actor_added", "actor_removed")
    }
    assert sorted(named["actor_removed"]) == [1, 2]
    assert sorted(named["actor_added"][:2]) == [1, 2]
    assert named["actor_added"][2] == 3
    assert sorted(harness.released) == ["echo-1", "echo-2"]


def test_a_failed_start_of_a_new_actor_is_reported_and_the_pool_stays(ray_here, tmp_path):
    harness = Pool(1, str(tmp_path / "units"), in_flight=2)

    async def work(pool: ActorPool) -> Any:
        harness.broken = True
        with pytest.raises(RunFailed, match="echo actor 1 did not start: .*no such weights"):
            await pool.supervisor.resize(2)
        return (pool.alive, pool.supervisor.starting, (await pool.call(Task("u"), Echo.work, 7))[0])

    assert harness.run(work) == (1, 0, 7)
    assert harness.released == ["echo-1"]


class Boss(Progress):
    """Requests another size at the board when an iteration's first chunks return.

    It waits for the new size before the next iteration.
    """

    session: Any = None

    def __init__(self, sizes: dict[int, int]):
        super().__init__()
        self.sizes, self.now, self.answers = sizes, -1, []
        self.requested: asyncio.Task[None] | None = None

    def start(self, total_iterations: int, start_iteration: int = 0) -> None:
        super().start(total_iterations, start_iteration)
        self.wait_between()

    def iteration_started(self, i: int, groups: int, images: int, totals: Any = None) -> None:
        super().iteration_started(i, groups, images, totals)
        self.now = i

    def advanced(self, stage: str, n: int = 1) -> None:
        super().advanced(stage, n)
        if stage == "explored" and self.now in self.sizes:
            self.requested = asyncio.create_task(self.ask({"rollout": self.sizes.pop(self.now)}))

    def wait_between(self) -> None:
        iteration = self.session.ring.iteration

        async def patient(index: int) -> Any:
            result = await iteration(index)
            if self.requested:
                await asyncio.wait_for(self.requested, 250)
            return result

        self.session.ring.iteration = patient

    async def ask(self, sizes: dict[str, int]) -> None:
        there = board()
        while not (
            runs := [
                key
                for key, state in (await there.runs.remote()).items()
                if state["run"] == self.session.config.name
            ]
        ):
            await asyncio.sleep(0.1)
        number = await there.request.remote(runs[0], sizes)
        while (answer := await there.outcome.remote(number)) is None:
            await asyncio.sleep(0.1)
        self.answers.append(answer)


def test_a_run_that_is_scaled_1_3_2_trains_the_same_bits(undisturbed, tiny_sd3_dir, tmp_path):
    boss = Boss({0: 3, 1: 2})
    config = tiny_config(
        tiny_sd3_dir,
        tmp_path,
        "scaled",
        services__rollout__actors=1,
        services__rollout__max_actors=3,
    )
    run = run_here(config, progress=boss)
    assert boss.answers == [(True, "rollout: 1 -> 3 actors"), (True, "rollout: 3 -> 2 actors")]
    assert selections(run) == selections(undisturbed)
    assert adapters(run, 3) == adapters(undisturbed, 3)
    events = run.events()
    scaled = [
        (event["before"], event["after"]) for event in events if event["event"] == "pool_scaled"
    ]
    assert scaled == [(1, 3), (3, 2)]
    assert not any(event["event"] in ("chunk_reissued", "actor_died") for event in events)
    assert [row["rollout/actors"] for row in run.metrics() if row["kind"] == "iteration"][2] == 2


class Patient(Progress):
    """Waits, before an iteration, until the pool has the size that the rule requested after the one
    before.
    """

    session: Any = None

    def start(self, total_iterations: int, start_iteration: int = 0) -> None:
        super().start(total_iterations, start_iteration)
        iteration = self.session.ring.iteration

        async def patient(index: int) -> Any:
            if self.session.scaling.running:
                await asyncio.wait_for(self.session.scaling.running, 250)
            return await iteration(index)

        self.session.ring.iteration = patient


def test_an_autoscaled_run_trains_the_same_bits(undisturbed, tiny_sd3_dir, tmp_path, monkeypatch):
    verdicts = iter([1, -1, 0])
    monkeypatch.setattr("cluster.driver.autoscale.verdict", lambda load, rule: next(verdicts))
    services = {
        "rollout": {"actors": 1, "max_actors": 2},
        "autoscale": {"enabled": True, "patience": 1},
    }
    run = run_here(
        tiny_config(tiny_sd3_dir, tmp_path, "sizes-itself", services=services), progress=Patient()
    )
    scaled = [
        (event["before"], event["after"])
        for event in run.events()
        if event["event"] == "pool_scaled"
    ]
    assert scaled == [(1, 2), (2, 1)]
    assert selections(run) == selections(undisturbed)
    assert adapters(run, 3) == adapters(undisturbed, 3)


def test_invalid_pool_sizes_are_refused_and_the_run_continues(ray_here, tiny_sd3_dir, tmp_path):
    boss = Boss({0: 300, 1: 99})
    rollout = {"actors": 1, "max_actors": 200}
    run = run_here(
        tiny_config(tiny_sd3_dir, tmp_path, "no", iterations=2, services__rollout=rollout),
        progress=boss,
    )
    (allowed, limit), (placed, room) = boss.answers
    assert not allowed and not placed
    assert "rollout: 300 actors: services.rollout.min_actors = 1, max_actors = 200" in limit
    assert "of 98 actors cannot be placed: each needs 0.5 CPU" in room
    names = [event["event"] for event in run.events()]
    assert names.count("scaling_refused") == 2 and names[-1] == "run_finished"
    assert "actor_added" not in names


RULE = Autoscale(enabled=True, grow_above=0.5, shrink_below=0.25, patience=2, step=0.25)
LIMITS = Service(actors=4, min_actors=2, max_actors=12)
WAITS, IDLES, FINE, SCORING = Load(0.8, 0.8), Load(0.1, 0.2), Load(0.4, 0.4), Load(0.8, 0.3)


@pytest.mark.parametrize(
    ("load", "expected"), [(WAITS, 1), (IDLES, -1), (FINE, 0), (SCORING, 0), (Load(0.9, 0.1), -1)]
)
def test_the_autoscaling_rule_judges_one_iteration(load, expected):
    assert verdict(load, RULE) == expected


@pytest.mark.parametrize(
    ("size", "loads", "expected"),
    [
        (4, [WAITS], 4),  # patience
        (4, [WAITS, WAITS], 5),
        (8, [IDLES, WAITS, WAITS], 10),  # a quarter, and only the newest count
        (8, [IDLES, IDLES], 6),
        (8, [WAITS, IDLES], 8),
        (11, [WAITS, WAITS], 12),  # the maximum
        (2, [IDLES, IDLES], 2),  # the minimum
        (3, [FINE, FINE], 3),
    ],
)
def test_the_autoscaling_rule_computes_the_next_size(size, loads, expected):
    assert size_for(size, loads, RULE, LIMITS) == expected


def row(load: Load) -> dict[str, float]:
    """Return the row of ``Meter`` for a load."""
    return {"busy/learner": 1 - load.learner_waits, "busy/rollout": load.rollout_busy}


def test_measurements_restart_after_the_pool_changed():
    """Loads of another size say nothing about this size, for any cause of the change."""
    scaler = Autoscaler(RULE, LIMITS)
    assert [scaler.size_after(4, row(WAITS)) for _ in range(2)] == [4, 5]
    assert [scaler.size_after(5, row(WAITS)) for _ in range(2)] == [5, 6]  # patience again
    assert scaler.size_after(6, row(WAITS)) == 6
    # a user scaled it to 8
    assert [scaler.size_after(8, row(WAITS)) for _ in range(2)] == [8, 10]
    no_room = [scaler.size_after(8, row(WAITS)) for _ in range(2)]
    assert no_room == [8, 10]  # it could not grow: requested again after the same patience


def test_disabled_autoscaling_does_nothing():
    assert size_for(4, [WAITS] * 9, Autoscale(), LIMITS) == 4


def test_an_error_during_autoscaling_is_an_event(tmp_path):
    """No other task would raise it."""
    rundir = RunDirectory(tmp_path)

    async def broken(kind: str, size: int, partly: bool) -> str:
        raise OSError(111, f"{kind} {size} {partly}")

    async def main() -> tuple[bool, str]:
        services: Any = SimpleNamespace(
            pools=[],
            rollout_pool=SimpleNamespace(alive=1),
            scale=broken,
            refresh_nodes=lambda: None,
            places=SimpleNamespace(joined_gpus=0),
        )
        scaling = Scaling(load("quickstart"), services, rundir, Progress())
        autoscaler: Any = SimpleNamespace(size_after=lambda size, row: size + 1)
        scaling._autoscaler = autoscaler
        scaling.end_iteration({})
        assert scaling.running is not None
        return await scaling.running

    why = "ConnectionRefusedError: [Errno 111] rollout 2 True"
    assert asyncio.run(main()) == (False, why)
    (event,) = rundir.events()
    assert (event["event"], event["asked"], event["why"]) == (
        "scaling_refused",
        {"rollout": 2},
        why,
    )
