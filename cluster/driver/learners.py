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
from typing import cast

from ray.exceptions import RayError

from actors.calls import Answer, AnyTask, Call, Caller, Method, R, Task, X, Y
from actors.clients import LearnerClient
from actors.learner import LearnerActor
from cluster.driver.rounds import OneAtATime, Rounds, Serialized
from cluster.runtime.member import ActorLost, Member
from cluster.runtime.pool import ActorPool
from cluster.runtime.starting import cause
from cluster.runtime.tasks import run_together
from configs.services import LearnerService
from learner.replicas import GroupBroken
from records.errors import InputsLost, RunFailed, StateLost

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
        self._order = OneAtATime()
        first = FirstReplica(pool)
        if sharding == "none":
            self.client = LearnerClient(pool, first, EveryReplica(pool), by)
        else:
            rounds = Rounds(pool, self._order)
            every = Serialized(EveryReplica(pool, PATIENCE_S), self._order)
            self.client = LearnerClient(rounds, first, every, by, sharding)

    async def start(self) -> None:
        """Create every replica, and make them one group."""
        await self.pool.start()
        await self._come_together()

    async def stop(self) -> None:
        """Kill every replica."""
        # before the actors: what is under way would take their end for a loss of the state
        await self._order.end()
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
            # not wait_for: it may swallow a cancellation, and the slot would then serve for ever
            async with asyncio.timeout(HINDSIGHT_S):
                await self.pool.failed.wait()
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
        self,
        task: Task[R],
        method: Method[[X, Y], R],
        messages: Callable[[int], Sequence[X]],
        shared: Y,
    ) -> R:
        """See ``Caller``. What is shared is put into the object store once, and each is sent a
        reference.
        """
        if len(self.pool.members) == 1:
            return await super().call_each(task, method, messages, shared)
        once, sent = self.pool.put(shared), messages(len(self.pool.members))
        calls = [Call(method.__name__, (message, once), {}) for message in sent]
        return cast(R, await self._all(task, calls.__getitem__))

    async def _all(self, task: AnyTask, call: Callable[[int], Call]) -> Answer:
        members = self.pool.members
        if len(members) == 1:
            return await self.pool.perform(task, call(0))
        # a loss is raised at once; a failure, which all of them hear of, when all have ended: they
        # write down what failed
        ending = _Ending(len(members), self.patience_s)
        found = await run_together(
            *(
                self._one(rank, member, task, call(rank), ending)
                for rank, member in enumerate(members)
            )
        )
        if ending.failures:
            raise ending.first
        return found[0]

    async def _one(
        self, rank: int, member: Member, task: AnyTask, call: Call, ending: _Ending
    ) -> Answer:
        key = cast(tuple[object, ...], task.key)  # as ``LearnerClient`` names its tasks
        own = replace(task, key=(*key, f"replica {rank}"))
        try:
            # past the queue, which would give all of them to whichever replica is free
            answer = await self.pool.perform_on(member, own, call)
        except RunFailed as failure:
            await ending.failed(rank, failure)
            return None
        ending.ended()
        return answer


class _Ending:
    """Of a call that all replicas were asked: how many have not ended, and how some failed.

    Only a failure waits for the others; were all to wait, a thousand would be woken for nothing.
    """

    def __init__(self, size: int, patience_s: float | None):
        self._left, self._patience_s = size, patience_s
        self._over = asyncio.Event()
        self.failures: dict[int, RunFailed] = {}  # by rank

    @property
    def first(self) -> RunFailed:
        """That of the lowest rank: the same fault is always told in the same words."""
        return self.failures[min(self.failures)]

    def ended(self) -> None:
        """One more has."""
        self._left -= 1
        if not self._left:
            self._over.set()

    async def failed(self, rank: int, failure: RunFailed) -> None:
        """One has failed. Returns when all have ended; raises ``first`` when patience is over."""
        self.failures[rank] = failure
        self.ended()
        try:
            async with asyncio.timeout(self._patience_s):
                await self._over.wait()
        except TimeoutError:
            raise self.first from None
