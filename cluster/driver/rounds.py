"""Calls to a learner whose base is sharded: a pass on any replica needs all replicas.

So all replicas do the same kind of work at a time, in the same order: an update, an export, or a
round of generating, in which each replica has a call of its own or stands by for the others.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import cast

from actors.calls import Answer, AnyTask, Call, Caller, Method, R, Task, X, Y
from actors.learner import LearnerActor
from actors.messages import GenerateRequest
from cluster.runtime.pool import ActorPool
from cluster.runtime.tasks import BackgroundTasks, run_together


class SerialExecutor:
    """Runs one piece of work at a time.

    Work that has started is completed even if its caller is cancelled: some of the replicas have
    started it already, and wait for the others.
    """

    def __init__(self) -> None:
        self._lock, self._tasks = asyncio.Lock(), BackgroundTasks()

    async def take(self, work: Callable[[], Coroutine[None, None, R]]) -> R:
        """Run ``work`` after all earlier work has ended, and return its result."""
        return await asyncio.shield(self._tasks.start(self._locked(work)))

    async def end(self) -> None:
        """Cancel all work, in progress or waiting."""
        await self._tasks.end()

    async def _locked(self, work: Callable[[], Coroutine[None, None, R]]) -> R:
        async with self._lock:
            return await work()


@dataclass(frozen=True)
class Serialized(Caller):
    """Calls of ``caller``, each run after all earlier work of ``order``."""

    caller: Caller
    order: SerialExecutor

    async def perform(self, task: AnyTask, call: Call) -> Answer:
        return await self.order.take(lambda: self.caller.perform(task, call))

    async def call_each(
        self,
        task: Task[R],
        method: Method[[X, Y], R],
        messages: Callable[[int], Sequence[X]],
        shared: Y,
    ) -> R:
        """See ``Caller``."""
        return await self.order.take(lambda: self.caller.call_each(task, method, messages, shared))


@dataclass(order=True)
class _Waiting:
    order: tuple[tuple[int, ...], int]
    task: AnyTask = field(compare=False)
    call: Call = field(compare=False)
    answer: asyncio.Future[Answer] = field(compare=False)

    @property
    def request(self) -> GenerateRequest:
        return cast(GenerateRequest, self.call.args[0])

    def goes_with(self, other: _Waiting) -> bool:
        """Return True if both use the same weights and solver, as all calls of a round must."""
        own, others = self.request, other.request
        return (own.weights, own.solver) == (others.weights, others.solver)


class Rounds(Caller):
    """Generating calls, run in rounds of up to one call per replica, lowest priority first."""

    def __init__(self, pool: ActorPool, order: SerialExecutor) -> None:
        self._pool, self._order = pool, order
        self._waiting: list[_Waiting] = []  # sorted
        self._numbers = itertools.count()

    async def perform(self, task: AnyTask, call: Call) -> Answer:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        waiting = _Waiting((task.priority, next(self._numbers)), task, call, answer)
        bisect.insort(self._waiting, waiting)
        try:
            # there are as many rounds as calls: an earlier round may have answered this call
            await self._order.take(self._round)
            return await answer
        finally:
            answer.cancel()  # a cancelled caller no longer waits

    async def _round(self) -> None:
        """Run one round. A failure is raised by the calls in it, not by the one that started it."""
        # chosen now, not when the round was requested: calls that came meanwhile may go first
        chosen = self._take_next(len(self._pool.members))
        if not chosen:
            return
        try:
            answers = await run_together(
                *(
                    self._pool.perform_on(member, waiting_call.task, waiting_call.call)
                    if (waiting_call := chosen[rank] if rank < len(chosen) else None)
                    else self._pool.perform_on(member, *self._stand_by_call(chosen[0], rank))
                    for rank, member in enumerate(self._pool.members)
                )
            )
        # does not catch a cancellation: then all work is ended, and no caller waits
        except Exception as error:
            for waiting in chosen:
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)
            return
        # not strict: the replicas that stood by are the last ones, and have no answer
        for waiting, answer in zip(chosen, answers, strict=False):
            if not waiting.answer.done():
                waiting.answer.set_result(answer)

    def _take_next(self, size: int) -> list[_Waiting]:
        """Remove and return the next up to ``size`` calls: the first one, and those that fit it."""
        chosen: list[_Waiting] = []
        remaining: list[_Waiting] = []
        for position, waiting in enumerate(self._waiting):
            if len(chosen) == size:
                remaining += self._waiting[position:]  # not examined: thousands may wait
                break
            if not waiting.answer.done():
                goes = not chosen or waiting.goes_with(chosen[0])
                (chosen if goes else remaining).append(waiting)
        self._waiting = remaining
        return chosen

    def _stand_by_call(self, first: _Waiting, rank: int) -> tuple[AnyTask, Call]:
        key = ("stand by", *cast(tuple[object, ...], first.task.key), rank)
        return Task[None](key), Call(LearnerActor.stand_by.__name__, (first.request,), {})
