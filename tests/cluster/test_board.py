"""The exchange of a run with the board, without Ray: requests, states, failures."""

import asyncio
import time
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import pytest
from ray.exceptions import RayActorError

from cluster.jobs.board import SILENT_S, Board, Link, RunState
from tests.cluster.test_status import STATE, allow


def test_a_request_with_a_lost_answer_is_carried_out_once():
    there, done = Board(), []

    async def act(sizes):
        done.append(sizes)
        return True, "so many"

    async def exchanges():
        link = Link("a#1", lambda: STATE, act)
        requested = there.request("a#1", {"rollout": 2})
        for _ in range(2):  # the first answer is lost
            recorded = there.exchange("a#1", STATE, {})
            assert recorded == [(requested, {"rollout": 2})]
        link._received(recorded, {})
        link._received(there.exchange("a#1", STATE, {}), {})
        await asyncio.sleep(0)
        outcomes = dict(link._outcomes)
        assert outcomes == {requested: (True, "so many")}
        link._received(there.exchange("a#1", STATE, outcomes), outcomes)
        assert there.exchange("a#1", STATE, {}) == [] and link._outcomes == {}
        return there.outcome(requested)

    assert asyncio.run(exchanges()) == (True, "so many")
    assert done == [{"rollout": 2}]
    # requests to a dead board are not confused with requests to the next one
    assert Board().request("a#1", {}) > there.request("a#1", {})


@pytest.mark.parametrize(("cpu_s", "sent"), [(0.0001, 21), (0.0195, 6), (0.0295, 4), (9.0, 3)])
def test_states_take_a_share_of_the_drivers_time(cpu_s, sent, monkeypatch):
    """Of 21 exchanges, a second apart: with 19.5 ms for a state there is one in four seconds.

    However long they take, there is one in ten seconds, and the board keeps the last.
    """
    there, now, cpu = Board(), 1000.0, 0.0
    kept: list[int] = []

    def state() -> RunState:
        nonlocal cpu
        cpu += cpu_s
        return {**STATE, "iteration": int(now)}

    class Answer:
        def remote(self, run: str, state: RunState | None, outcomes: dict[int, Any]) -> Any:
            answer: Future[Any] = Future()
            answer.set_result(there.exchange(run, state, outcomes))
            kept.append(there.runs()[run]["iteration"])
            return Mock(future=lambda: answer)

    async def pause(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 1020:
            raise asyncio.CancelledError

    clock = Mock(monotonic=lambda: now, thread_time=lambda: cpu, time_ns=time.time_ns)
    monkeypatch.setattr("cluster.jobs.board.time", clock)
    monkeypatch.setattr("cluster.jobs.board.asyncio.sleep", pause)
    monkeypatch.setattr("cluster.jobs.board.board", lambda: Mock(exchange=Answer()))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(Link("a#1", state, allow).live())
    assert len(kept) == 21 and len(set(kept)) == sent
    assert there.runs()["a#1"]["iteration"] == max(kept) >= 1010


def test_a_run_that_left_is_not_shown_again_by_a_late_exchange():
    there = Board()
    there.exchange("a#1", STATE, {})
    there.leave("a#1")
    assert there.exchange("a#1", None, {}) == [] and there.runs() == {}


def test_a_failure_of_the_board_is_an_event_and_the_run_continues(monkeypatch):
    """Failures: an error in reporting the state, a lost board, and a board of another version."""
    events: list[tuple[str, Any]] = []
    lost_thrice = ["lost", "lost", "lost", "answers"]
    requested = iter(
        ["defect", "answers", *lost_thrice, "lost", "answers", "other", "answers", "end"]
    )
    over = asyncio.Event()

    class Answer:
        def __init__(self, value: Any):
            self.value = value

        def remote(self, *_: Any) -> Any:
            return self

        def future(self) -> Any:
            return self.value

    class Made:
        @property
        def exchange(self) -> Any:
            self.what = next(requested)
            if self.what == "end":
                over.set()
            answer: Any = Future()
            if self.what == "lost":
                answer.set_exception(RayActorError())
            else:
                answer.set_result(7 if self.what == "other" else [])
            return Answer(answer)

        def leave(self) -> None: ...  # it has no ``remote``

    made = Made()

    def state() -> RunState:
        if made.what == "defect":
            raise KeyError("rollout")
        return STATE

    async def exchanges() -> None:
        link = Link("a#1", state, allow, lambda name, **more: events.append((name, more["why"])))
        task = asyncio.create_task(link.live())
        async with asyncio.timeout(30):
            await over.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await link.leave()  # raises nothing

    monkeypatch.setattr("cluster.jobs.board.PERIOD_S", 0.01)
    monkeypatch.setattr("cluster.jobs.board.board", lambda: made)
    asyncio.run(exchanges())
    lost = "RayActorError: The actor experienced an error before finishing this task."
    assert events == [
        ("board_failed", "KeyError: 'rollout'"),
        ("board_failed", lost),  # reported after three times in a row, once
        ("board_failed", "TypeError: 'int' object is not iterable"),
        ("board_failed", "AttributeError: 'function' object has no attribute 'remote'"),
    ]


def test_a_run_that_exchanges_without_a_new_state_is_not_silent(monkeypatch):
    there, clock = Board(), Mock(monotonic=lambda: 0.0)
    monkeypatch.setattr("cluster.jobs.board.time", clock)
    there.exchange("a#1", STATE, {})
    clock.monotonic = lambda: SILENT_S - 1
    there.exchange("a#1", None, {})
    clock.monotonic = lambda: 2 * SILENT_S - 2
    assert there.runs() == {"a#1": STATE}
    clock.monotonic = lambda: 2 * SILENT_S
    assert there.runs() == {}
