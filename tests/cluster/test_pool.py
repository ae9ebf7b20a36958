"""The actor pool with faults.

Invariants: every task is answered exactly once, with its own answer; what killed an actor counts
against the task and the actor, and both have limits; nothing hangs.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actors.calls import Task
from cluster.driver.cleanup import traceback_field
from cluster.runtime.member import Member
from cluster.runtime.pool import ActorPool
from planning.placement import NoRoom
from records.errors import RunFailed
from tests.cluster.echo import Echo, Pool


def test_every_task_gets_its_own_answer(ray_here):
    async def work(pool: ActorPool) -> list[int]:
        return await asyncio.gather(*(pool.call(Task(i), Echo.double, i) for i in range(40)))

    assert Pool(3).run(work) == [2 * i for i in range(40)]


def test_large_results_stay_references(ray_here):
    async def work(pool: ActorPool) -> Any:
        meta, reference = await pool.call_parts(Task("pair"), 2, Echo.pair, 7)
        return meta, len(await reference)

    assert Pool(1).run(work) == (7, 200_000)


def test_lower_priority_values_run_first(ray_here):
    order: list[int] = []

    async def work(pool: ActorPool) -> None:
        async def one(p: int) -> None:
            await pool.call(Task(p, (p,)), Echo.double, p, 0.05)
            order.append(p)

        await asyncio.gather(*(one(p) for p in (5, 3, 4, 1, 2)))

    Pool(1, in_flight=1).run(work)
    assert order == [1, 2, 3, 4, 5]


def test_an_actor_finishes_its_tasks_before_a_direct_call(ray_here):
    """As in publishing weights: running tasks are finished, the actor loads, and then it
    continues.
    """
    harness = Pool(1, in_flight=2)

    async def work(pool: ActorPool) -> Any:
        units = [
            asyncio.create_task(pool.call(Task(i), Echo.note, f"chunk {i}", 0.3)) for i in range(3)
        ]
        while pool.members[0].sent < 2:
            await asyncio.sleep(0.01)

        async def load(member: Member) -> None:
            await pool.ask(member, Echo.note, "load")

        await pool.each(load)
        return (await asyncio.gather(*units))[-1]

    assert harness.run(work) == ["chunk 0", "chunk 1", "load", "chunk 2"]
    assert "chunk_reissued" not in harness.names()


def test_a_killed_actor_is_replaced_and_its_tasks_are_answered_once(ray_here, tmp_path):
    harness = Pool(2)

    async def work(pool: ActorPool) -> Any:
        calls = [pool.call(Task(i), Echo.double, i, 0.05) for i in range(20)]
        answers = await asyncio.gather(
            pool.call(Task("x"), Echo.fatal, str(tmp_path / "died"), 99), *calls
        )
        # the other actor may have answered everything before that
        while "actor_replaced" not in harness.names():
            await asyncio.sleep(0.1)
        return answers

    assert harness.run(work) == [99, *(2 * i for i in range(20))]
    assert harness.names().count("actor_died") == 1 and harness.names().count("actor_replaced") == 1
    assert harness.pool.reissued == harness.names().count("chunk_reissued") >= 1


def test_a_hung_actor_is_killed_after_its_deadline(ray_here, tmp_path):
    harness = Pool(1, deadline_s=3.0)

    async def work(pool: ActorPool) -> Any:
        return await pool.call(Task("h"), Echo.hang_once, str(tmp_path / "hung"))

    assert harness.run(work) == "woke elsewhere"
    died = [fields for name, fields in harness.events if name == "actor_died"]
    assert [fields["why"] for fields in died] == ["no answer for 3 s"]


def test_a_task_that_kills_every_actor_is_named_and_ends_the_run(ray_here):
    harness = Pool(2, max_attempts=2)

    async def work(pool: ActorPool) -> Any:
        return await pool.call(Task("chunk 17"), Echo.poison)

    with pytest.raises(RunFailed, match="chunk 17 failed 2 times"):
        harness.run(work)
    assert harness.names().count("chunk_reissued") == 1


def test_the_running_task_is_blamed_and_not_the_waiting_one(ray_here):
    harness = Pool(1, max_attempts=2, in_flight=2)

    async def work(pool: ActorPool) -> Any:
        calls = (
            pool.call(Task("bad", (0,)), Echo.poison),
            pool.call(Task("good", (1,)), Echo.double, 4),
        )
        return await asyncio.gather(*calls, return_exceptions=True)

    failed, answer = harness.run(work)
    assert isinstance(failed, RunFailed) and "bad failed 2 times" in str(failed)
    assert answer == 8
    (recovered,) = [fields for name, fields in harness.events if name == "chunk_recovered"]
    assert (recovered["unit"], recovered["retries"]) == ("good", 1)  # then it runs alone
    mine = [span for span in harness.spans if span.work == "good"]
    # counted, though it was not the cause
    assert [(span.attempt, span.outcome) for span in mine] == [(0, "lost"), (1, "done")]


def test_a_task_lost_with_others_is_not_blamed_for_the_kill(ray_here):
    """Two threads, so that the killer acts while the task before it runs, whose answer is lost with
    the actor.

    That task is blamed once, and then each runs alone. Together again, it would be blamed until its
    attempts are exhausted.
    """
    harness = Pool(1, max_attempts=2, in_flight=2)
    harness.options["max_concurrency"] = 2

    async def work(pool: ActorPool) -> Any:
        calls = (
            pool.call(Task("good", (0,)), Echo.double, 4, 0.5),
            pool.call(Task("bad", (1,)), Echo.poison),
        )
        return await asyncio.gather(*calls, return_exceptions=True)

    answer, failed = harness.run(work)
    assert answer == 8
    assert isinstance(failed, RunFailed) and "bad failed 2 times" in str(failed)
    # the last one may be killed by the end of the pool before it is discarded
    assert 2 <= harness.names().count("actor_died") <= 3


def test_an_exception_is_retried_and_then_reported(ray_here):
    harness = Pool(1, max_attempts=2)
    with pytest.raises(RunFailed, match="KeyError: 'broken'"):
        harness.run(lambda pool: pool.call(Task("f"), Echo.fail))
    assert "actor_died" not in harness.names()
    # once, although the actor raised twice
    (raised,) = [fields for name, fields in harness.events if name == "actor_raised"]
    assert (raised["unit"], raised["why"]) == ("f", "KeyError: 'broken'")
    assert 'raise KeyError("broken")' in raised["traceback"]
    assert "echo.py" in raised["traceback"] and "\x1b" not in raised["traceback"]


def test_an_actor_past_its_restarts_is_benched_and_without_any_the_run_ends(ray_here):
    harness = Pool(1, max_restarts=1, max_attempts=9)
    with pytest.raises(RunFailed, match="no echo actor is left"):
        harness.run(lambda pool: pool.call(Task("p"), Echo.poison))
    assert harness.names().count("actor_benched") == 1


def test_the_error_of_a_constructor_is_reported(ray_here):
    harness = Pool(1)
    harness.broken = True
    with pytest.raises(RunFailed, match="no such weights: give another path"):
        harness.run(lambda pool: pool.call(Task("d"), Echo.double, 1))
    (raised,) = [fields for name, fields in harness.events if name == "actor_raised"]
    assert raised["unit"] == "start" and "in __init__" in raised["traceback"]


def test_a_rejected_answer_is_retried_on_another_actor(ray_here):
    harness = Pool(2)
    requested: list[int] = []

    def accept(value: int) -> str | None:
        requested.append(value)
        return "again" if len(requested) < 3 else None

    assert (
        harness.run(lambda pool: pool.call(Task("d", accept=accept, tries=5), Echo.double, 4)) == 8
    )
    actors = [fields["actor"] for name, fields in harness.events if name == "chunk_reissued"]
    assert len(requested) == 3 and len(actors) == 2 and actors[0] != actors[1]


def test_a_rejected_answer_of_the_last_attempt_fails_the_task(ray_here):
    assert (
        Pool(1).run(
            lambda pool: pool.call(Task("d", accept=lambda value: "no", tries=2), Echo.double, 4)
        )
        == 8
    )


# ---- a place that is empty for a while


class Slow(Pool):
    """A pool whose actor 0 dies at once and is not replaced, because there is no room."""

    def __init__(self, **service: Any):
        super().__init__(2, max_restarts=1, **service)
        spawn, self.room = self.pool.supervisor.spawn, True

        def spawn_where_there_is_room(name: str) -> Any:
            if not self.room:
                raise NoRoom(["no room"])
            return spawn(name)

        self.pool.supervisor.spawn = spawn_where_there_is_room

    async def lose_one(self, path: Path) -> Member:
        self.room = False
        assert await self.pool.call(Task("dies"), Echo.fatal, str(path), 7) == 7
        (empty,) = [member for member in self.pool.members if member.handle is None]
        return empty


def test_a_member_without_an_actor_does_not_hold_tasks(ray_here, tmp_path):
    """There are enough tasks for every waiting slot; those of the empty place would hold one for
    the start deadline.
    """
    harness = Slow(in_flight=2)

    async def work(pool: ActorPool) -> list[int]:
        await harness.lose_one(tmp_path / "dead")
        return await asyncio.wait_for(
            asyncio.gather(*(pool.call(Task(i), Echo.double, i, 0.1) for i in range(8))), 20
        )

    assert harness.run(work) == [2 * i for i in range(8)]
    assert "actor_benched" not in harness.names()


def test_calls_to_all_actors_skip_members_without_an_actor(ray_here, tmp_path):
    harness, recorded = Slow(), []

    async def work(pool: ActorPool) -> int:
        empty = await harness.lose_one(tmp_path / "dead")

        async def tell(member: Member) -> None:
            recorded.append(member.index)

        await asyncio.wait_for(pool.each(tell), 20)
        return empty.index

    assert recorded == [1 - harness.run(work)]


def test_an_actor_can_be_removed_while_it_is_being_replaced(ray_here, tmp_path):
    harness = Slow()

    async def work(pool: ActorPool) -> int:
        empty = await harness.lose_one(tmp_path / "dead")
        if empty.index == 0:
            pool.members.reverse()  # the last ones leave
        await asyncio.wait_for(pool.supervisor.resize(1), 20)
        return await pool.call(Task("u"), Echo.double, 3)

    assert harness.run(work) == 6
    assert "actor_removed" in harness.names() and "actor_benched" not in harness.names()


def test_an_actor_that_raises_in_a_call_to_all_is_replaced(ray_here):
    harness = Pool(2)

    async def work(pool: ActorPool) -> int:
        async def tell(member: Member) -> None:
            if member.index == 0 and member.incarnation == 0:
                await pool.ask(member, Echo.fail)

        await pool.each(tell)
        while harness.names().count("actor_replaced") < 1:
            await asyncio.sleep(0.02)
        return await pool.call(Task("u"), Echo.double, 3)

    assert harness.run(work) == 6
    ((_, died),) = [event for event in harness.events if event[0] == "actor_died"]
    assert died["actor"] == 0 and "KeyError: 'broken'" in died["why"]
    (raised,) = [fields for name, fields in harness.events if name == "actor_raised"]
    assert raised["unit"] == "a call to all actors" and "in fail" in raised["traceback"]


def test_an_error_in_the_driver_ends_the_run(ray_here):
    """As when the disk is full and an event cannot be written."""

    class Full(Pool):
        def event(self, name: str, **fields: Any) -> None:
            if name == "chunk_reissued":
                raise OSError(28, "No space left on device", "events.jsonl")
            super().event(name, **fields)

    async def work(pool: ActorPool) -> list[BaseException]:
        return await asyncio.gather(
            *(pool.call(Task(i), Echo.fail) for i in range(4)), return_exceptions=True
        )

    for error in Full(1).run(work):
        assert isinstance(error, RunFailed)
        assert "No space left on device: 'events.jsonl'" in str(error)
        assert "in event" in traceback_field(error)["traceback"]


def test_a_failed_replacement_of_an_idle_actor_ends_the_run(ray_here, tmp_path):
    """As when Ray itself fails while an idle actor is replaced."""
    harness = Pool(1)

    def broken(name: str) -> Any:
        raise OSError(111, "Connection refused")

    async def work(pool: ActorPool) -> None:
        pool.supervisor.spawn = broken

        async def tell(member: Member) -> None:
            await pool.ask(member, Echo.poison)

        await pool.each(tell)
        await asyncio.wait_for(pool.call(Task("later"), Echo.double, 1), 20)

    with pytest.raises(RunFailed, match="echo-0 is replaced: ConnectionRefusedError"):
        harness.run(work)


def test_the_last_one_benched_while_another_fails_to_start_ends_the_run(ray_here, tmp_path):
    harness = Slow()

    async def work(pool: ActorPool) -> BaseException:
        await pool.supervisor.resize(1)
        pool.supervisor.start_deadline_s, harness.room = 2.0, False
        growing = asyncio.create_task(pool.supervisor.resize(2))
        await asyncio.sleep(0.2)
        pool.members[0].restarts = 1  # its last one
        (error,) = await asyncio.gather(pool.call(Task("p"), Echo.poison), return_exceptions=True)
        with pytest.raises(RunFailed, match="could not be placed"):
            await growing
        return error

    error = harness.run(work)
    assert isinstance(error, RunFailed) and "no echo actor is left" in str(error)


def test_an_incompatible_new_actor_is_refused(ray_here):
    harness = Pool(1)
    harness.pool.accepts = lambda info: f"has pid {info.pid}, which is not allowed"

    async def work(pool: ActorPool) -> int:
        with pytest.raises(RunFailed, match="echo actor 1 has pid [0-9]+, which is not allowed"):
            await pool.supervisor.resize(2)
        return pool.alive

    assert harness.run(work) == 1 and "actor_added" not in harness.names()


def test_if_one_actor_fails_to_start_the_other_starts_are_cancelled(ray_here):
    """Nobody would notice an actor that starts after the pool was stopped."""
    harness = Pool(2)

    def broken_or_without_room(name: str) -> Any:
        if name.startswith("echo-0"):
            raise OSError(111, "Connection refused")
        raise NoRoom([f"no room for {name}"])

    async def work() -> set[asyncio.Task[Any]]:
        with pytest.raises(OSError, match="Connection refused"):
            await harness.pool.start()
        await harness.pool.stop()
        return asyncio.all_tasks() - {asyncio.current_task()}

    harness.pool.supervisor.spawn = broken_or_without_room
    assert asyncio.run(work()) == set()
