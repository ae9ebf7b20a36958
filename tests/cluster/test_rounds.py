"""Calls to replicas that share the base.

Invariants: all of them get calls of one kind, in one order, one at a time; every call is answered
once, by one of them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.calls import Call, Caller, Task
from actors.learner import LearnerActor
from actors.messages import GenerateRequest
from cluster.driver import learner_group
from cluster.driver.learner_group import LearnerGroup
from cluster.driver.rounds import Rounds, SerialExecutor, Serialized, _Waiting
from cluster.runtime.pool import ActorPool
from configs.services import LearnerService
from records.errors import RunFailed, StateLost


class Members:
    """Stand-in for the pool that records each member's calls in ``done`` and their order in
    ``log``.

    With ``waits`` calls wait until the test opens the ``door``.
    """

    def __init__(self, size: int, waits: bool = False, fails: str = ""):
        self.members: list[Any] = list(range(size))
        self.done: list[list[tuple[str, Any]]] = [[] for _ in range(size)]
        self.log: list[tuple[str, int]] = []
        self.door, self.fails = asyncio.Event(), fails
        if not waits:
            self.door.set()

    async def perform_on(self, member: int, task: Task[Any], call: Call) -> Any:
        self.log.append(("begin", member))
        self.done[member].append((call.method, task.key))
        await asyncio.sleep(0)
        await self.door.wait()
        if call.method == self.fails:
            raise StateLost("gone")
        self.log.append(("end", member))
        return member, task.key


class Everyone(Caller):
    """Sends the same call to all members, as ``EveryReplica`` does."""

    def __init__(self, pool: Members):
        self.pool = pool

    async def perform(self, task: Task[Any], call: Call) -> Any:
        return await asyncio.gather(
            *(self.pool.perform_on(member, task, call) for member in self.pool.members)
        )


def callers(pool: Members) -> tuple[Rounds, Serialized]:
    order = SerialExecutor()
    standin: Any = pool
    return Rounds(standin, order), Serialized(Everyone(pool), order)


def generating(rounds: Rounds, number: int, weights: str = "old", priority: int = 0) -> Any:
    request = GenerateRequest((number,), 2, "euler", weights)
    task = Task[Any](("regenerate", number), (priority,))
    return rounds.perform(task, Call("generate", (request, None), {}, 3))


def test_a_round_has_one_kind_of_call_and_other_replicas_stand_by():
    """Seven calls over three replicas; the fourth is the most urgent, and uses other weights."""
    pool = Members(3)

    async def work() -> list[Any]:
        rounds, _ = callers(pool)
        kinds = ["old", "old", "old", "ema", "old", "ema", "old"]
        urgent = [2, 2, 2, 1, 2, 3, 2]
        calls = zip(range(7), kinds, urgent, strict=True)
        return await asyncio.gather(*(generating(rounds, *each) for each in calls))

    answers = asyncio.run(work())
    assert [key for _, key in answers] == [("regenerate", n) for n in range(7)]
    numbers = [[key[-1 if method == "generate" else 2] for method, key in one] for one in pool.done]
    methods = [[method for method, _ in one] for one in pool.done]
    assert numbers == [[3, 0, 4], [5, 1, 6], [3, 2, 4]]
    assert methods == [["generate"] * 3, ["generate"] * 3, ["stand_by", "generate", "stand_by"]]
    assert getattr(LearnerActor, methods[2][0])
    # the next calls are sent only after all members have answered
    for first in range(0, len(pool.log), 6):
        assert [what for what, _ in pool.log[first : first + 6]] == ["begin"] * 3 + ["end"] * 3


def test_waiting_calls_are_compared_only_if_a_round_has_room(monkeypatch):
    """Of 400 calls over four replicas, one is compared with the first of its round, and no more."""
    requested, real = [], _Waiting.goes_with

    def counted(each: _Waiting, other: _Waiting) -> bool:
        requested.append(each)
        return real(each, other)

    monkeypatch.setattr(_Waiting, "goes_with", counted)
    pool = Members(4)

    async def work() -> None:
        rounds, _ = callers(pool)
        await asyncio.gather(*(generating(rounds, n) for n in range(400)))

    asyncio.run(work())
    assert [len(one) for one in pool.done] == [100] * 4 and len(requested) == 300


def test_updates_and_rounds_run_in_one_order():
    pool = Members(2)

    async def work() -> None:
        rounds, everyone = callers(pool)
        update = everyone.perform(Task[Any](("update", 0)), Call("update", (), {}))
        export = everyone.perform(Task[Any](("export", 1)), Call("export", (), {}))
        mine = [generating(rounds, n) for n in range(3)]
        await asyncio.gather(mine[0], update, mine[1], export, mine[2])

    asyncio.run(work())
    orders = [["generate" if m == "stand_by" else m for m, _ in one] for one in pool.done]
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == ["export", "generate", "generate", "update"]


def test_a_cancelled_call_does_not_stop_its_round():
    """Replicas in a pass wait for each other: the round continues, and then the next one starts."""
    pool = Members(2, waits=True)

    async def work() -> Any:
        rounds, everyone = callers(pool)
        tasks = [asyncio.create_task(generating(rounds, n)) for n in range(3)]
        while not all(pool.done):
            await asyncio.sleep(0)
        for gone in (tasks[0], tasks[2]):
            gone.cancel()
        update = asyncio.create_task(
            everyone.perform(Task[Any](("update", 0)), Call("update", (), {}))
        )
        for _ in range(9):
            await asyncio.sleep(0)
        assert [len(one) for one in pool.done] == [1, 1]
        pool.door.set()
        return await tasks[1], await update

    (_, key), _ = asyncio.run(work())
    assert key == ("regenerate", 1)
    assert [[method for method, _ in one] for one in pool.done] == [["generate", "update"]] * 2


def test_the_loss_of_a_replica_fails_the_whole_round():
    pool = Members(2, fails="stand_by")

    async def work() -> list[Any]:
        rounds, _ = callers(pool)
        return await asyncio.gather(
            *(generating(rounds, n) for n in range(3)), return_exceptions=True
        )

    answers = asyncio.run(work())
    assert [key for _, key in answers[:2]] == [("regenerate", 0), ("regenerate", 1)]
    assert isinstance(answers[2], StateLost)


def test_a_failure_does_not_wait_for_blocked_replicas(monkeypatch: pytest.MonkeyPatch):
    """A failure within a pass leaves the other replica waiting; the failure still ends the run."""

    async def work() -> None:
        monkeypatch.setattr(learner_group, "PATIENCE_S", 0.0)
        service = LearnerService(replicas=2, shard="base")
        pool = ActorPool("learner", lambda name: None, service, lambda *a, **k: None, stateful=True)
        group = LearnerGroup(pool)
        assert isinstance(group.client.any_replica, Rounds)

        async def perform_on(member: int, task: Task[Any], call: Call) -> Any:
            if member == 1:
                raise RunFailed("out of order")
            await asyncio.Event().wait()

        monkeypatch.setattr(ActorPool, "members", [0, 1])
        monkeypatch.setattr(pool, "perform_on", perform_on)
        task, call = Task[Any](("update", 0)), Call("update", (), {})
        with pytest.raises(RunFailed, match="out of order"):
            await group.client.every_replica.perform(task, call)

    asyncio.run(work())
