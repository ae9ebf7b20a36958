"""The learner: one actor, or a group of replicas that train one LoRA together and live and die
together.

Replicas are equal bit by bit between two calls. When one dies or hangs, or they lose each other,
the state is lost as that of a single learner is: ``renew`` puts new ones in all places, which find
each other and load the checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from ray.exceptions import RayError

from actors.calls import Answer, AnyTask, Call, Caller, Method, Task
from actors.clients import LearnerClient
from actors.learner import LearnerActor
from cluster.driver.rounds import InTurn, Rounds, Turns
from cluster.runtime.member import ActorLost, Member
from cluster.runtime.pool import ActorPool
from cluster.runtime.starting import cause
from cluster.runtime.tasks import run_together
from configs.services import LearnerService
from learner.replicas import GroupBroken
from records.errors import InputsLost, RunFailed, StateLost

R = TypeVar("R")
X = TypeVar("X")
RENDEZVOUS_TRIES = 3
"""Times that replicas may be lost while they find each other, one after the other."""
HINDSIGHT_S = 5.0
"""How long a replica that lost the others waits for Ray to say which of them died. It notices at
once, Ray within two seconds, and the first loss that is told names the cause.
"""
PATIENCE_S = 30.0
"""How long a replica's failure waits for the others where the base is sharded. All hear of what
goes wrong between passes, and write it down; within a pass they would wait for it in vain.
"""


class LearnerGroup:
    """The replicas of the learner, on a pool that holds one actor for each."""

    def __init__(self, pool: ActorPool):
        self.pool = pool
        pool.lost_by = self._lost_by
        assert isinstance(pool.service, LearnerService)
        by, sharding = pool.service.share, pool.service.shard
        self._turns = Turns()
        first = FirstReplica(pool)
        if sharding == "none":
            self.client = LearnerClient(pool, first, EveryReplica(pool), by)
        else:
            rounds = Rounds(pool, self._turns)
            every = InTurn(EveryReplica(pool, PATIENCE_S), self._turns)
            self.client = LearnerClient(rounds, first, every, by, sharding)

    async def start(self) -> None:
        """Create every replica, and make them one group."""
        await self.pool.start()
        await self._come_together()

    async def stop(self) -> None:
        """Kill every replica."""
        await self._turns.end()
        await self.pool.stop()

    async def renew(self, why: str) -> None:
        """Put new replicas in all places, and make them one group."""
        await self.pool.renew(why)
        await self._come_together()

    async def _come_together(self) -> None:
        """Raises RunFailed when the replicas cannot."""
        size = len(self.pool.members)
        if size == 1:
            return
        why = ""
        for _ in range(RENDEZVOUS_TRIES):
            try:
                return await self._join()
            except (ActorLost, InputsLost, StateLost) as loss:
                why = f"lost while the replicas met: {loss}"
                await self.pool.renew(why)
            except RayError as error:
                why = cause(error)
                break
        raise RunFailed(
            f"the {size} replicas of the learner did not come together: {why}; their"
            " nodes must reach each other on any port, then continue with --resume"
        )

    async def _join(self) -> None:
        members, service = self.pool.members, self.pool.service
        assert isinstance(service, LearnerService)
        # no longer than the deadline: replicas must give up by themselves, and say whom they miss,
        # before the driver kills all of them without knowing which was at fault
        timeout_s = min(service.silence_s, service.deadline_s)
        size = len(members)
        # the first opens the store; its address is known only when it listens
        at = await self.pool.ask(members[0], LearnerActor.rendezvous, timeout_s)
        await run_together(
            *(
                self.pool.ask(member, LearnerActor.join, rank, size, at)
                for rank, member in enumerate(members)
            )
        )
        where = f"{at.host}:{at.port}"
        self.pool.event("replicas_met", kind=self.pool.kind, replicas=size, where=where)

    async def _lost_by(self, error: RayError) -> str | None:
        """A replica that lost the others is lost itself, but did not die first: it lets the loss
        that is the cause be told before its own.
        """
        raised = getattr(error, "cause", None)
        if not isinstance(raised, GroupBroken):
            return None
        # without one it is the first to know, and its own words are the cause
        with suppress(TimeoutError):
            await asyncio.wait_for(self.pool.failed.wait(), HINDSIGHT_S)
        return str(raised)


@dataclass(frozen=True)
class FirstReplica(Caller):
    """Calls that any replica would answer alike, and that leave something behind on it."""

    pool: ActorPool

    async def perform(self, task: AnyTask, call: Call) -> Answer:
        members = self.pool.members
        # alone it is a pool like any other, whose queue has priorities
        if len(members) == 1:
            return await self.pool.perform(task, call)
        return await self.pool.perform_on(members[0], task, call)


@dataclass(frozen=True)
class EveryReplica(Caller):
    """Calls that change the state: every replica gets one, the first one's answer counts.

    ``patience_s``: how long a failure waits for those that have not ended; None: until they have.
    """

    pool: ActorPool
    patience_s: float | None = None

    async def perform(self, task: AnyTask, call: Call) -> Answer:
        return await self._all(task, lambda rank: call)

    async def call_each(
        self, task: Task[R], method: Method[[X], R], messages: Callable[[int], Sequence[X]]
    ) -> R:
        """See ``Caller``: each replica is sent its own message."""
        sent = messages(len(self.pool.members))
        calls = [Call(method.__name__, (message,), {}) for message in sent]
        return cast(R, await self._all(task, calls.__getitem__))

    async def _all(self, task: AnyTask, call: Callable[[int], Call]) -> Answer:
        members = self.pool.members
        if len(members) == 1:
            return await self.pool.perform(task, call(0))
        # a loss is raised at once; a failure, which all of them hear of, when all have ended: they
        # write down what failed
        ended, failures = asyncio.Barrier(len(members)), dict[int, RunFailed]()
        found = await run_together(
            *(
                self._one(rank, member, task, call(rank), ended, failures)
                for rank, member in enumerate(members)
            )
        )
        if failures:
            raise failures[min(failures)]
        return found[0]

    async def _one(
        self,
        rank: int,
        member: Member,
        task: AnyTask,
        call: Call,
        ended: asyncio.Barrier,
        failures: dict[int, RunFailed],
    ) -> Answer:
        key = cast(tuple[object, ...], task.key)  # as ``LearnerClient`` names its tasks
        own = replace(task, key=(*key, f"replica {rank}"))
        answer: Answer = None
        patience_s = None
        try:
            # past the queue, which would give all of them to whichever replica is free
            answer = await self.pool.perform_on(member, own, call)
        except RunFailed as failure:
            failures[rank] = failure
            patience_s = self.patience_s
        try:
            async with asyncio.timeout(patience_s):
                await ended.wait()
        except TimeoutError:
            # of the lowest rank: the same fault is always told in the same words
            raise failures[min(failures)] from None
        return answer
