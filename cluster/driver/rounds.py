"""Calls to a learner whose base is sharded: every pass of any replica takes all of them.

So all replicas are asked for things of one kind at a time, in one order: an update, an export, or a
round of generating, in which each has a call of its own or stands by for the others.
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


class OneAtATime:
    """One thing at a time. What has begun is ended although its caller no longer waits: some of
    the replicas are at it already, and wait for the others.
    """

    def __init__(self) -> None:
        self._lock, self._tasks = asyncio.Lock(), BackgroundTasks()

    async def take(self, work: Callable[[], Coroutine[None, None, R]]) -> R:
        """What ``work`` returns, once all that came before has ended."""
        return await asyncio.shield(self._tasks.start(self._alone(work)))

    async def end(self) -> None:
        """Cancel whatever is under way."""
        await self._tasks.end()

    async def _alone(self, work: Callable[[], Coroutine[None, None, R]]) -> R:
        async with self._lock:
            return await work()


@dataclass(frozen=True)
class Serialized(Caller):
    """Calls of ``caller``, each after all that came before."""

    caller: Caller
    order: OneAtATime

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
        """Whether both go through the same weights, as everything in a round must."""
        mine, its = self.request, other.request
        return (mine.weights, mine.solver) == (its.weights, its.solver)


class Rounds(Caller):
    """Generating: as many calls at a time as there are replicas, those of lowest priority first."""

    def __init__(self, pool: ActorPool, order: OneAtATime) -> None:
        self._pool, self._order = pool, order
        self._waiting: list[_Waiting] = []  # sorted
        self._numbers = itertools.count()

    async def perform(self, task: AnyTask, call: Call) -> Answer:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        mine = _Waiting((task.priority, next(self._numbers)), task, call, answer)
        bisect.insort(self._waiting, mine)
        try:
            # as many rounds as calls: this one may have been answered in another's
            await self._order.take(self._round)
            return await answer
        finally:
            answer.cancel()  # who is cancelled waits no longer

    async def _round(self) -> None:
        """Its failure is that of those who were chosen, whichever call asked for it."""
        # chosen now and not when it was asked: what came meanwhile may go first
        chosen = self._chosen(len(self._pool.members))
        if not chosen:
            return
        try:
            answers = await run_together(
                *(
                    self._pool.perform_on(member, mine.task, mine.call)
                    if (mine := chosen[rank] if rank < len(chosen) else None)
                    else self._pool.perform_on(member, *self._standing_by(chosen[0], rank))
                    for rank, member in enumerate(self._pool.members)
                )
            )
        # not a cancellation: then nobody waits, as the whole order is ended
        except Exception as error:
            for each in chosen:
                if not each.answer.done():
                    each.answer.set_exception(error)
            return
        # not strict: replicas that stood by are the last ones, and have nothing to say
        for each, answer in zip(chosen, answers, strict=False):
            if not each.answer.done():
                each.answer.set_result(answer)

    def _chosen(self, size: int) -> list[_Waiting]:
        """Who comes next: the first that waits, and up to ``size`` that go with it."""
        chosen: list[_Waiting] = []
        left: list[_Waiting] = []
        for place, each in enumerate(self._waiting):
            if len(chosen) == size:
                left += self._waiting[place:]  # not looked at: thousands may wait
                break
            if not each.answer.done():
                goes = not chosen or each.goes_with(chosen[0])
                (chosen if goes else left).append(each)
        self._waiting = left
        return chosen

    def _standing_by(self, first: _Waiting, rank: int) -> tuple[AnyTask, Call]:
        key = ("stand by", *cast(tuple[object, ...], first.task.key), rank)
        return Task[None](key), Call(LearnerActor.stand_by.__name__, (first.request,), {})
