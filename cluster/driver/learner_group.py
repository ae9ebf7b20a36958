"""The learner: one actor, or a group of replicas that train one LoRA and are replaced together.

Replicas are bitwise equal between two calls. If one dies or hangs, or they lose the connection to
each other, the state is lost, as with a single learner: ``renew`` replaces all of them and joins
the new ones into a group, which then loads a checkpoint.
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
from cluster.driver.rounds import Rounds, SerialExecutor, Serialized
from cluster.runtime.member import ActorLost, Member
from cluster.runtime.pool import ActorPool
from cluster.runtime.starting import NotPlaced, cause
from cluster.runtime.tasks import BackgroundTasks, run_together
from configs.services import LearnerService
from learner.replicas import GroupBroken
from records.errors import InputsLost, RunFailed, StateLost

RENDEZVOUS_TRIES = 3
"""Attempts to join the replicas into one group when replicas are lost during the rendezvous."""
HINDSIGHT_S = 5.0
"""Seconds that the error of a replica that lost its peers waits for Ray to report which died.

The replica notices at once, Ray within two seconds, and the first loss reported names the cause.
"""
PATIENCE_S = 30.0
"""Seconds that a replica's failure waits for the other replicas if the base is sharded.

A failure between passes reaches all of them, and each records it; within a pass the others would
wait for the failed replica in vain.
"""


class LearnerGroup:
    """The replicas of the learner, in a pool with one actor for each."""

    def __init__(self, pool: ActorPool):
        self.pool = pool
        pool.lost_by, pool.on_state_stranded = self._lost_by, self._restart_now
        assert isinstance(pool.service, LearnerService)
        by, sharding = pool.service.share, pool.service.shard
        self._order = SerialExecutor()
        self._restarts = BackgroundTasks()
        self._restart: asyncio.Task[None] | None = None  # until ``renew``
        self._forming = True  # ``start`` or ``renew`` is running
        first = FirstReplica(pool)
        if sharding == "none":
            self.client = LearnerClient(pool, first, EveryReplica(pool), by)
        else:
            rounds = Rounds(pool, self._order)
            every = Serialized(EveryReplica(pool, PATIENCE_S), self._order)
            self.client = LearnerClient(rounds, first, every, by, sharding)

    async def start(self) -> None:
        """Create every replica, and join them into one group."""
        await self.pool.start()
        await self._form_group()
        self._forming = False

    async def stop(self) -> None:
        """Kill every replica."""
        # before the actors: calls in progress would mistake their end for a loss of the state
        await self._order.end()
        await self._restarts.end()
        await self.pool.stop()

    async def renew(self, why: str) -> None:
        """Replace all replicas, and join the new ones into one group."""
        self._forming = True
        try:
            await self._replace_all(why)
        except NotPlaced as error:
            fewer = "; with services.learner.elastic = true also on fewer GPUs"
            several = fewer if len(self.pool.members) > 1 else ""
            raise RunFailed(f"{error}; continue with --resume{several}") from None
        await self._form_group()
        self._forming = False

    def _restart_now(self, why: str) -> None:
        """Start new replicas at once after a loss that no call reports; ``renew`` joins them.

        The run returns to a checkpoint only at its next call to the learner. It might never come to
        that: what it explores before may need rollout actors that were lost as well, and these are
        started after the learner, whose share of a GPU is larger (``ActorPlacement``).
        """
        # what is being formed finds a lost replica itself, and must not lose others to a restart
        if not self._forming and (self._restart is None or self._restart.done()):
            self._restart = self._restarts.start(self.pool.supervisor.renew(why))

    async def _replace_all(self, why: str) -> None:
        restart, self._restart = self._restart, None
        if restart is not None:
            await restart
            if all(member.handle is not None for member in self.pool.members):
                return self.pool.reopen()
        await self.pool.renew(why)

    async def _form_group(self) -> None:
        """Join the replicas into one group. Raises RunFailed if that is not possible."""
        size = len(self.pool.members)
        if size == 1:
            return
        why = ""
        for _ in range(RENDEZVOUS_TRIES):
            try:
                return await self._join()
            except (ActorLost, InputsLost, StateLost) as loss:
                why = f"lost while the replicas connected: {loss}"
                await self.pool.renew(why)
            except RayError as error:
                why = cause(error)
                break
        raise RunFailed(
            f"the {size} replicas of the learner could not connect: {why}; make sure that their"
            " nodes reach each other on all ports, then continue with --resume"
        )

    async def _join(self) -> None:
        members, service = self.pool.members, self.pool.service
        assert isinstance(service, LearnerService)
        # no longer than the deadline: replicas must time out by themselves, and report which
        # replica is missing, before the driver kills all of them without knowing the cause
        timeout_s = min(service.silence_s, service.deadline_s)
        size = len(members)
        # the first replica opens the store; its address is known only once it listens
        rendezvous = await self.pool.ask(members[0], LearnerActor.rendezvous, timeout_s)
        await run_together(
            *(
                self.pool.ask(member, LearnerActor.join, rank, size, rendezvous)
                for rank, member in enumerate(members)
            )
        )
        where = f"{rendezvous.host}:{rendezvous.port}"
        self.pool.event("replicas_met", kind=self.pool.kind, replicas=size, where=where)

    async def _lost_by(self, error: RayError) -> str | None:
        """Return why ``error`` means that its replica is lost, or None (``ActorPool.lost_by``).

        A replica that lost its peers is lost as well, but did not die first, so wait for the loss
        that caused this one to be reported before it.
        """
        raised = getattr(error, "cause", None)
        if not isinstance(raised, GroupBroken):
            return None
        # if no other loss is reported, this error is the cause
        with suppress(TimeoutError):
            # not wait_for: it may swallow a cancellation, and the slot would then never end
            async with asyncio.timeout(HINDSIGHT_S):
                await self.pool.failed.wait()
        return str(raised)


@dataclass(frozen=True)
class FirstReplica(Caller):
    """Calls to the first replica: any would give the same answer, but state may stay on it.

    For example, shards must be fetched from a replica that holds the export.
    """

    pool: ActorPool

    async def perform(self, task: AnyTask, call: Call) -> Answer:
        members = self.pool.members
        # a single learner is a pool like any other, whose queue has priorities
        if len(members) == 1:
            return await self.pool.perform(task, call)
        return await self.pool.perform_on(members[0], task, call)


@dataclass(frozen=True)
class EveryReplica(Caller):
    """Calls that change the state: sent to every replica; the first replica's answer is returned.

    ``patience_s``: seconds that a failure waits for the calls of the other replicas to end; None:
    without limit.
    """

    pool: ActorPool
    patience_s: float | None = None

    async def perform(self, task: AnyTask, call: Call) -> Answer:
        return await self._call_all(task, lambda rank: call)

    async def call_each(
        self,
        task: Task[R],
        method: Method[[X, Y], R],
        messages: Callable[[int], Sequence[X]],
        shared: Y,
    ) -> R:
        """See ``Caller``. ``shared`` is put into the object store once and sent by reference."""
        if len(self.pool.members) == 1:
            return await super().call_each(task, method, messages, shared)
        shared_ref, per_replica = self.pool.put(shared), messages(len(self.pool.members))
        calls = [Call(method.__name__, (message, shared_ref), {}) for message in per_replica]
        return cast(R, await self._call_all(task, calls.__getitem__))

    async def _call_all(self, task: AnyTask, call: Callable[[int], Call]) -> Answer:
        members = self.pool.members
        if len(members) == 1:
            return await self.pool.perform(task, call(0))
        # a loss is raised at once; a failure, which reaches every replica, when all have ended:
        # each of them records what failed
        ending = _Ending(len(members), self.patience_s)
        answers = await run_together(
            *(
                self._call_one(rank, member, task, call(rank), ending)
                for rank, member in enumerate(members)
            )
        )
        if ending.failures:
            raise ending.first
        return answers[0]

    async def _call_one(
        self, rank: int, member: Member, task: AnyTask, call: Call, ending: _Ending
    ) -> Answer:
        key = cast(tuple[object, ...], task.key)  # ``LearnerClient`` uses tuples as task keys
        replica_task = replace(task, key=(*key, f"replica {rank}"))
        try:
            # bypasses the queue, which would give these calls to whichever replica is free
            answer = await self.pool.perform_on(member, replica_task, call)
        except RunFailed as failure:
            await ending.failed(rank, failure)
            return None
        ending.ended()
        return answer


class _Ending:
    """Completion of a call sent to all replicas: how many are still running, and the failures.

    Only a failed call waits for the others; if all of them waited, a thousand tasks would be woken
    for nothing.
    """

    def __init__(self, size: int, patience_s: float | None):
        self._left, self._patience_s = size, patience_s
        self._over = asyncio.Event()
        self.failures: dict[int, RunFailed] = {}  # by rank

    @property
    def first(self) -> RunFailed:
        """The failure of the lowest rank, so that the same fault gives the same message."""
        return self.failures[min(self.failures)]

    def ended(self) -> None:
        """Count one more call as ended."""
        self._left -= 1
        if not self._left:
            self._over.set()

    async def failed(self, rank: int, failure: RunFailed) -> None:
        """Record a failure; return when all calls have ended, or raise ``first`` on timeout."""
        self.failures[rank] = failure
        self.ended()
        try:
            async with asyncio.timeout(self._patience_s):
                await self._over.wait()
        except TimeoutError:
            raise self.first from None
