"""Turns on GPUs.

Invariants: rollout actors and the learner are never on a GPU together, whatever is lost or
cancelled; results do not depend on it.
"""

import asyncio
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from actors.calls import Call, Task
from actors.learner import LearnerActor
from actors.messages import ActorInfo, Moved
from actors.rollout import RolloutActor
from cluster.driver.gpu_turns import GpuTurns, InGpuTurn
from cluster.runtime.member import Member
from configs.load import ConfigError
from records.errors import RunFailed, StateLost
from tests.cluster.faults import Fault, FaultInjector
from tests.cluster.local import LocalPool, play
from tests.cluster.outcomes import outcome
from tests.cluster.runs import run_here, tiny_config

BOTH = {"services__rollout__between_turns": "host", "services__learner__between_turns": "host"}


class Gpu:
    """The actors on a GPU; more than one side at a time is an error."""

    def __init__(self) -> None:
        self.here: set[tuple[str, int]] = set()
        self.log: list[str] = []

    def sides(self) -> set[str]:
        return {side for side, _ in self.here}


class OnGpu:
    """An actor of one side."""

    def __init__(self, gpu: Gpu, side: str, index: int):
        self.gpu, self.who = gpu, (side, index)

    def ready(self) -> ActorInfo:
        return ActorInfo(0, "here")

    def begin_turn(self) -> Moved:
        self.gpu.here.add(self.who)
        assert len(self.gpu.sides()) == 1, f"both are on the GPU: {self.gpu.here}"
        return Moved(10, 1.0 + self.who[1])

    def end_turn(self) -> Moved:
        self.gpu.here.discard(self.who)
        return Moved(10, 1.0 + self.who[1])

    def explore(self) -> str:
        return self._work("explore")

    def update(self) -> str:
        return self._work("update")

    def save(self) -> str:
        self.gpu.log.append("save")
        return "save"

    def _work(self, what: str) -> str:
        assert self.who in self.gpu.here, f"{self.who} works without the GPU"
        self.gpu.log.append(what)
        return what


class Stand:
    """Turns of two rollout actors and two replicas on one GPU; ``ask`` is a call of one side."""

    def __init__(self, seed: int = 0):
        self.gpu, chance = Gpu(), random.Random(seed)

        def pool(side: str) -> Any:
            actors = [OnGpu(self.gpu, side, index) for index in range(2)]
            return LocalPool(actors, chance, [], waits=6)

        self.rollout, self.learner = pool("rollout"), pool("learner")
        self.events: list[tuple[str, Any]] = []
        self.turns = GpuTurns(
            self.rollout, self.learner, lambda name, **fields: self.events.append((name, fields))
        )

        async def prepare(member: Member, key: object) -> None:
            await self.turns.ensure_on_gpu(member)

        self.rollout.prepare = prepare

    async def ask(self, what: str) -> str:
        side: Any = "rollout" if what == "explore" else "learner"
        caller = InGpuTurn(getattr(self, side), self.turns, side)
        return await caller.perform(Task((what,)), Call(what, (), {}))


def run(scene: Callable[[], Any]) -> Any:
    return asyncio.run(scene())


@pytest.mark.parametrize("seed", range(20))
def test_rollout_actors_and_learner_are_never_on_the_gpu_together(seed):
    async def scene() -> Stand:
        stand, chance = Stand(seed), random.Random(seed)
        requested = [chance.choice(["explore", "update"]) for _ in range(40)]

        async def late(what: str) -> str:
            for _ in range(chance.randrange(40)):
                await asyncio.sleep(0)
            return await stand.ask(what)

        assert await asyncio.gather(*map(late, requested)) == requested
        assert sorted(stand.gpu.log) == sorted(requested)
        return stand

    run(scene)


def test_the_learner_waits_until_all_requested_chunks_are_explored():
    async def scene() -> None:
        stand = Stand()
        exploring = [asyncio.create_task(stand.ask("explore")) for _ in range(8)]
        await asyncio.sleep(0)
        await stand.ask("update")
        await asyncio.gather(*exploring)
        assert stand.gpu.log == ["explore"] * 8 + ["update"]
        assert [fields["kind"] for _, fields in stand.events] == ["rollout", "learner"]
        # each time the slower of two actors: come, leave, come
        assert stand.turns.take_metrics() == {"memory/moved_s": 6.0, "memory/moved_bytes": 60}
        assert stand.turns.take_metrics() == {"memory/moved_s": 0, "memory/moved_bytes": 0}

    run(scene)


def test_a_checkpoint_does_not_wait_for_a_turn():
    async def scene() -> None:
        stand = Stand()
        await stand.ask("explore")
        async with stand.turns.hold("rollout"):
            await stand.ask("save")
        assert stand.gpu.log == ["explore", "save"] and stand.turns.holder == "rollout"

    run(scene)


def test_a_replaced_rollout_actor_moves_to_the_gpu_before_its_first_task():
    async def scene() -> None:
        stand = Stand()
        member = stand.rollout.members[0]
        async with stand.turns.hold("rollout"):
            await stand.turns.ensure_on_gpu(member)
            stand.gpu.here.clear()
            member.has_gpu = False  # in the state in which ``Member.kill`` leaves it
            await stand.turns.ensure_on_gpu(member)
        assert stand.gpu.here == {("rollout", 0)}

    run(scene)


def test_a_new_learner_moves_to_the_gpu_within_its_turn():
    async def scene() -> None:
        stand = Stand()
        await stand.ask("update")
        stand.gpu.here.clear()
        for member in stand.learner.members:
            member.has_gpu = False
        assert await stand.ask("update") == "update"

    run(scene)


def test_out_of_turn_a_rollout_actor_does_not_move_to_the_gpu():
    async def scene() -> None:
        stand = Stand()
        await stand.ask("update")
        with pytest.raises(RunFailed, match="in the learner's turn on the GPU"):
            await stand.turns.ensure_on_gpu(stand.rollout.members[0])

    run(scene)


def test_losing_the_learner_at_the_end_of_its_turn_fails_waiting_explorations():
    async def scene() -> None:
        stand = Stand()
        await stand.ask("update")

        async def lost(member: Member, task: object, call: object) -> None:
            raise StateLost("it died")

        working, stand.learner.perform_on = stand.learner.perform_on, lost
        with pytest.raises(StateLost, match="it died"):
            await stand.ask("explore")
        assert stand.turns.holder is None and not stand.gpu.log.count("explore")
        stand.learner.perform_on = working
        # an actor of unknown state is asked to leave again
        assert await stand.ask("explore") == "explore"

    run(scene)


@pytest.mark.parametrize("turns", range(1, 24))
def test_cancelling_a_turn_change_leaves_a_consistent_state(turns):
    async def scene() -> None:
        stand = Stand(turns)
        await stand.ask("update")
        exploring = asyncio.create_task(stand.ask("explore"))
        for _ in range(turns):
            await asyncio.sleep(0)
        exploring.cancel()
        await asyncio.gather(exploring, return_exceptions=True)
        assert await stand.ask("update") == "update"
        assert await stand.ask("explore") == "explore"

    run(scene)


# ---- the product's own actors


@pytest.mark.parametrize(
    "leaving", [BOTH, {"services__learner__between_turns": "host"}], ids=["both", "learner"]
)
def test_turns_do_not_change_the_bits_of_a_run(tiny_sd3_dir, tmp_path, leaving, monkeypatch):
    away, sides = set[str](), {LearnerActor: "learner", RolloutActor: "rollout"}
    moved = list[int]()

    def watched(actor: type, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Any, *args: Any) -> Any:
            found = method(self, *args)
            side = sides[actor]
            away.discard(side) if name == "begin_turn" else away.add(side)
            moved.append(found.nbytes)
            return found

        return call

    def working(actor: type, method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Any, *args: Any) -> Any:
            other = "rollout" if sides[actor] == "learner" else "learner"
            assert sides[actor] not in away and other in away
            return method(self, *args)

        return call

    plain = play(tiny_config(tiny_sd3_dir, tmp_path, "stay"), tmp_path / "stay", explorers=2)
    for actor in sides:
        for name in ("begin_turn", "end_turn"):
            monkeypatch.setattr(actor, name, watched(actor, name, getattr(actor, name)))
        away.add(sides[actor])
    for actor, names in {
        RolloutActor: ("explore", "load", "probe"),
        LearnerActor: ("generate", "update", "export", "probe"),
    }.items():
        for name in names:
            monkeypatch.setattr(actor, name, working(actor, getattr(actor, name)))
    config = tiny_config(tiny_sd3_dir, tmp_path, "host", **leaving)
    run = play(config, tmp_path / "host", explorers=2)
    assert run.files() == plain.files() and run.chosen == plain.chosen
    assert any(moved)
    for index, row in run.rows.items():
        mine, others = row.pop("memory/moved_s"), row.pop("memory/moved_bytes")
        assert mine > 0 and others > 0
        same = {k for k in row if "images_per_s" not in k and not k.startswith("time/")}
        assert {k: row[k] for k in same} == {k: plain.rows[index][k] for k in same}


def test_actors_refuse_calls_out_of_turn(tiny_sd3_dir, tmp_path):
    config = tiny_config(tiny_sd3_dir, tmp_path, "refused", **BOTH)
    fetch: Any = list
    learner = LearnerActor(config.model_dump(mode="json"), str(tmp_path), fetch=fetch)
    with pytest.raises(RuntimeError, match="the learner was called to export outside its"):
        learner.export(0)
    learner.begin_turn()
    learner.export(0)
    learner.end_turn()
    with pytest.raises(RuntimeError, match="the learner was called to export outside its"):
        learner.export(1)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"explore_ahead": 1}, "rollout.between_turns: 'host' with explore_ahead = 1"),
        (
            {"services__learner__shard": "base", "services__learner__replicas": 2},
            "learner.between_turns: 'host' with services.learner.shard = 'base': shards cannot",
        ),
        ({"lora__base": "int8"}, "learner.between_turns: 'host' with lora.base = 'int8'"),
    ],
)
def test_incompatible_settings_of_between_turns_are_refused(tiny_sd3_dir, tmp_path, changes, line):
    with pytest.raises(ConfigError, match=line):
        tiny_config(tiny_sd3_dir, tmp_path, "refused", **BOTH, **changes)


@pytest.mark.slow  # ``tests.simulator.test_turns`` has the same losses in virtual time
@pytest.mark.timeout(900)  # two processes are restarted
def test_losses_during_turns_change_nothing(undisturbed, tiny_sd3_dir, tmp_path):
    """A rollout actor dies in its turn, and the learner in its own; both start again without the
    GPU.

    No actor is called out of turn, which would end the run.
    """
    faults = Fault("rollout", "kill", 0, "explored"), Fault("learner", "kill", 1, "update")
    injector = FaultInjector(*faults)
    config = tiny_config(tiny_sd3_dir, tmp_path, "turns", checkpoint__every=1, **BOTH)
    run = run_here(config, progress=injector)
    assert outcome(run, 3) == outcome(undisturbed, 3)
    events = run.events()
    assert {each["kind"] for each in events if each["event"] == "actor_died"} == {
        "rollout",
        "learner",
    }
    turns = [each["kind"] for each in events if each["event"] == "gpu_turn"]
    # evaluation, export, exploring, and so on: never the same side twice
    assert turns[0] == "learner" and all(a != b for a, b in itertools.pairwise(turns))
    assert len(turns) >= 2 * 3
