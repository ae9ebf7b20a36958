"""A pool whose actors' nodes are lost, without Ray.

Calls end that would otherwise wait until Ray gives a node up, idle actors are replaced too, no task
is blamed, and a start on a lost node is repeated elsewhere.
"""

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from ray.exceptions import OutOfMemoryError

from actors.calls import Call, Task
from actors.messages import ActorInfo
from cluster.runtime.member import ActorLost
from cluster.runtime.pool import ActorPool
from cluster.runtime.starting import LOW_MEMORY_STARTS
from configs.services import Service
from records.errors import RunFailed, StateLost

IDLE_END = (
    "Ray killed it because its node is low on memory (RAY_memory_usage_threshold) (it had no task)"
)


class Works:
    def work(self) -> str: ...


class Nodes:
    """A transport and its nodes: an actor answers while its node exists.

    Actors are placed on the first node that exists.
    """

    def __init__(self, *names: str):
        self.names, self.silent = names, set[str]()
        self.gone: dict[str, asyncio.Future[str]] = {}
        self.homes: dict[str, str] = {}
        self.killed: list[str] = []
        self.ended_on = set[str]()
        self.events: list[tuple[str, dict[str, Any]]] = []

    def spawn(self, name: str) -> str:
        home = next(node for node in self.names if not self._of(node).done())
        self.homes[name.rpartition(".")[0]] = home
        self.ended_on.discard(home)
        return home

    def _of(self, node: str) -> asyncio.Future[str]:
        return self.gone.setdefault(node, asyncio.get_running_loop().create_future())

    def gone_of(self, actor: str, node: str | None) -> asyncio.Future[str]:
        return self._of(node or self.homes[actor])

    def notice(self, node: str) -> None:
        """Treat a silent node as lost."""
        self._of(node).set_result("silent")

    def send(self, handle: str, call: Call) -> Sequence[Any]:
        future = asyncio.get_running_loop().create_future()
        if handle in self.ended_on and handle not in self.silent:
            future.set_exception(OutOfMemoryError("Refer to the documentation on how to address"))
        elif handle not in self.silent:
            answer = ActorInfo(1, handle, handle) if call.method == "ready" else handle
            future.set_result(answer)
        return [future]

    def answer(self, reference: Any) -> asyncio.Future[Any]:
        return reference

    def kill(self, handle: str) -> None:
        self.killed.append(handle)

    def ended(self, handle: str) -> bool:
        return handle in self.ended_on

    def pool(self, actors: int = 1, stateful: bool = False, **service: Any) -> ActorPool:
        def tell(name: str, **fields: Any) -> None:
            self.events.append((name, fields))

        return ActorPool(
            "service",
            self.spawn,
            Service(actors=actors, **service),
            tell,
            stateful=stateful,
            transport=self,  # type: ignore[arg-type]
            gone=self.gone_of,
        )

    def recorded(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == name]


def run(pool: ActorPool, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def all_of_it() -> Any:
        await pool.start()
        try:
            return await asyncio.wait_for(work(), 30)
        finally:
            await pool.stop()

    return asyncio.run(all_of_it())


def test_tasks_of_a_lost_node_are_retried_without_blame():
    nodes = Nodes("a", "b", "c", "d")
    pool = nodes.pool(max_attempts=1)  # a single counted failure would end the run

    async def work() -> list[str]:
        nodes.silent.add("a")
        calls = [asyncio.create_task(pool.call(Task(i), Works.work)) for i in range(2)]
        while pool.members[0].sent < 2:
            await asyncio.sleep(0.01)
        nodes.notice("a")
        return list(await asyncio.gather(*calls))

    assert run(pool, work) == ["b", "b"]
    assert [fields["why"] for fields in nodes.recorded("actor_died")] == ["silent"]
    assert nodes.killed[0] == "a"  # it may still be running behind a cut cable
    assert {fields["why"] for fields in nodes.recorded("chunk_reissued")} == {"silent"}


def test_finished_calls_leave_no_references_to_their_node():
    """A node has many actors with many calls: the end of each must not traverse all others."""
    nodes = Nodes("a", "b")
    pool = nodes.pool(in_flight=8)

    async def work() -> list[str]:
        before = len(nodes.gone["a"]._callbacks or ())
        nodes.silent.add("a")
        calls = [asyncio.create_task(pool.call(Task(i), Works.work)) for i in range(8)]
        while pool.members[0].sent < 8:
            await asyncio.sleep(0.01)
        assert len(nodes.gone["a"]._callbacks or ()) == before > 0
        nodes.notice("a")
        return await asyncio.gather(*calls)

    assert run(pool, work) == ["b"] * 8


def test_an_idle_actor_on_a_lost_node_is_replaced_at_once():
    nodes = Nodes("a", "b")
    pool = nodes.pool()

    async def work() -> str:
        nodes.notice("a")
        while not nodes.recorded("actor_replaced"):
            await asyncio.sleep(0.01)
        return await pool.call(Task("x"), Works.work)

    assert run(pool, work) == "b"
    assert len(nodes.recorded("actor_died")) == 1 and not nodes.recorded("chunk_reissued")


def test_an_actor_that_ended_while_idle_is_replaced_without_a_call():
    nodes = Nodes("a")
    pool = nodes.pool(actors=2, max_restarts=1)

    async def work() -> list[int]:
        nodes.silent.add("a")
        call = asyncio.create_task(
            pool.perform_on(pool.members[0], Task("x"), Call("work", (), {}))
        )
        while not pool.members[0].sent:
            await asyncio.sleep(0.01)
        nodes.ended_on.add("a")  # the end of an actor with a task is reported by the call
        nodes.silent.clear()
        pool.report_ended()
        pool.report_ended()  # before the reason is known
        while not nodes.recorded("actor_replaced"):
            await asyncio.sleep(0.01)
        call.cancel()
        return [member.incarnation for member in pool.members]

    assert run(pool, work) == [0, 1]
    (died,) = nodes.recorded("actor_died")
    assert died["why"] == IDLE_END
    assert not nodes.recorded("chunk_reissued")


def test_state_of_an_actor_that_ended_while_idle_is_lost():
    nodes, restarts = Nodes("a"), []
    pool = nodes.pool(stateful=True)
    pool.on_state_stranded = restarts.append

    async def work() -> None:
        nodes.ended_on.add("a")
        pool.report_ended()
        pool.report_ended()  # before the reason is known
        while not restarts:
            await asyncio.sleep(0)
        with pytest.raises(StateLost, match=re.escape(IDLE_END)):
            await pool.call(Task("x"), Works.work)

    run(pool, work)
    assert restarts == [IDLE_END]


def test_an_actor_starts_elsewhere_if_its_node_is_lost_meanwhile(monkeypatch):
    monkeypatch.setattr("cluster.runtime.starting.PAUSE_S", 0.01)
    nodes = Nodes("a", "b")
    pool = nodes.pool()

    async def main() -> str:
        nodes.silent.add("a")
        starting = asyncio.create_task(pool.start())
        while not nodes.homes:
            await asyncio.sleep(0.01)
        nodes.notice("a")
        await asyncio.wait_for(starting, 30)
        answer = await pool.call(Task("x"), Works.work)
        await pool.stop()
        return answer

    assert asyncio.run(main()) == "b"
    assert not nodes.recorded("actor_died") and nodes.killed == ["a", "b"]


@pytest.mark.parametrize("busy", [True, False])
def test_state_on_a_lost_node_is_lost_at_once(busy):
    nodes = Nodes("a", "b")
    pool = nodes.pool(stateful=True, in_flight=1)

    async def work() -> str:
        nodes.silent.add("a")
        call = asyncio.create_task(pool.call(Task("x"), Works.work)) if busy else None
        while busy and not pool.members[0].sent:
            await asyncio.sleep(0.01)
        nodes.notice("a")
        await pool.failed.wait()
        with pytest.raises(StateLost, match="the service was lost: silent"):
            await (call or pool.call(Task("y"), Works.work))
        await pool.renew("silent")
        return await pool.call(Task("z"), Works.work)

    assert run(pool, work) == "b"
    assert len(nodes.recorded("actor_died")) == 1


def killed_by_ray(nodes: Nodes, method: str, times: int) -> Callable[..., Sequence[Any]]:
    """Let ``times`` calls of ``method`` end as Ray lets them end when its memory monitor kills the
    actor.
    """
    left, send = [None] * times, nodes.send

    def killing(handle: str, call: Call) -> Sequence[Any]:
        if call.method != method or not left:
            return send(handle, call)
        left.pop()
        future = asyncio.get_running_loop().create_future()
        future.set_exception(OutOfMemoryError("Refer to the documentation on how to address"))
        return [future]

    return killing


def test_a_kill_by_rays_memory_monitor_counts_as_a_loss(monkeypatch):
    nodes = Nodes("a")
    pool = nodes.pool()
    monkeypatch.setattr(nodes, "send", killed_by_ray(nodes, "work", 1))

    async def work() -> str:
        return await pool.call(Task("x"), Works.work)

    assert run(pool, work) == "a"
    why = "Ray killed it because its node is low on memory (RAY_memory_usage_threshold)"
    assert [fields["why"] for fields in nodes.recorded("actor_died")] == [why]
    assert len(nodes.recorded("actor_replaced")) == 1


def test_after_a_kill_by_rays_memory_monitor_state_is_lost_and_a_start_is_retried(monkeypatch):
    monkeypatch.setattr("cluster.runtime.starting.PAUSE_S", 0.01)
    nodes = Nodes("a")
    pool = nodes.pool(stateful=True, in_flight=1)
    monkeypatch.setattr(nodes, "send", killed_by_ray(nodes, "work", 1))

    async def work() -> str:
        with pytest.raises(StateLost, match="the service was lost: Ray killed it because its node"):
            await pool.call(Task("x"), Works.work)
        monkeypatch.setattr(nodes, "send", killed_by_ray(nodes, "ready", LOW_MEMORY_STARTS - 1))
        await pool.renew("lost")
        return await pool.call(Task("y"), Works.work)

    assert run(pool, work) == "a"
    recorded = nodes.recorded("actor_waits")
    assert [fields["why"].partition(" because")[0] for fields in recorded] == ["Ray killed it"]


def test_starts_on_a_node_low_on_memory_are_retried_for_a_minute(monkeypatch):
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    nodes = Nodes("a")
    pool = nodes.pool()
    monkeypatch.setattr("cluster.runtime.starting.asyncio.sleep", sleep)
    monkeypatch.setattr(nodes, "send", killed_by_ray(nodes, "ready", LOW_MEMORY_STARTS))
    with pytest.raises(RunFailed, match="service actor 0 did not start: Ray killed it because"):
        asyncio.run(pool.start())
    assert slept == [1, 2, 4, 8, 16, 32]


def test_a_stopped_driver_does_not_blame_actors_for_silence(monkeypatch):
    """After SIGSTOP for longer than the deadline, the driver reads the answer late, though it was
    sent in time.
    """
    now = [0.0]
    monkeypatch.setattr("cluster.runtime.clock.now", lambda: now[0])
    nodes = Nodes("a")
    pool = nodes.pool(deadline_s=5.0)

    async def work() -> Any:
        member, late = pool.members[0], asyncio.get_running_loop().create_future()
        monkeypatch.setattr(nodes, "send", lambda handle, call: [late])
        call = asyncio.create_task(pool.ask(member, Works.work))

        await asyncio.sleep(0)  # it is requested at 0, so that an answer is due at 5
        now[0] = 60.0  # the timer, in real time, rings 55 seconds late
        await asyncio.sleep(0.01)
        now[0] = 64.9  # as if it had just begun to wait
        await asyncio.sleep(0.01)
        late.set_result("answer")
        return await call

    assert run(pool, work) == "answer"
    assert not nodes.recorded("actor_died")


def test_silence_is_measured_from_the_drivers_return_and_from_each_answer(monkeypatch):
    """Lost 5 s after the driver's return at 60; an answer at 63 extends the limit of the other call
    to 68.
    """
    now = [0.0]
    monkeypatch.setattr("cluster.runtime.clock.now", lambda: now[0])
    nodes = Nodes("a")
    pool = nodes.pool(deadline_s=5.0)

    async def work() -> list[bool]:
        loop, member = asyncio.get_running_loop(), pool.members[0]
        answers = [loop.create_future() for _ in range(2)]
        sent = iter(answers)
        monkeypatch.setattr(nodes, "send", lambda handle, call: [next(sent)])
        calls = [asyncio.create_task(pool.ask(member, Works.work)) for _ in answers]
        await asyncio.sleep(0)
        found = []
        for moment in (60.0, 63.0, 65.1, 67.9, 68.0):
            now[0] = moment
            if moment == 63.0:
                answers[0].set_result("answer")
            await asyncio.sleep(0.01)
            found.append(calls[1].done())
        with pytest.raises(ActorLost, match="no answer for 5 s"):
            await calls[1]
        return found

    assert run(pool, work) == [False, False, False, False, True]
