"""A group of equal actors that pull tasks, and outlive any of their members.

One way for every service: rollout, reward, selector, encoder and learner. A task is a method call
that may be repeated. Each actor has ``in_flight`` slots that pull from one queue. When an actor
dies or hangs it is killed and replaced, and every task that it held goes back to the queue, with a
limit per task and per actor. Nothing is counted twice, because a task has one future and the first
answer settles it.

A pool grows and shrinks while it works: a new actor starts to pull, one that leaves finishes what
it holds. The service with a state, the learner, is ``stateful``: its tasks are not tried again, and
every call fails with StateLost until the pool is renewed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import cast

from ray import ObjectRef
from ray.exceptions import RayError

from actors.calls import Answer, AnyTask, Call, Caller, Method, P, R
from actors.messages import ActorInfo
from cluster.runtime.answers import Answers
from cluster.runtime.member import ActorLost, Member, Vacant
from cluster.runtime.outcomes import Outcomes
from cluster.runtime.queue import PendingTask
from cluster.runtime.sending import Sender
from cluster.runtime.starting import Gone, Spawn, cause
from cluster.runtime.supervisor import Supervisor
from cluster.runtime.tasks import BackgroundTasks
from cluster.runtime.transport import RAY, Transport
from configs.services import Service
from records.errors import InputsLost, OutOfMemoryError, RunFailed, StateLost
from records.rundir import Event
from records.timeline import Span

START_DEADLINE_S = 600.0


class ActorPool(Caller):
    """See the module. Three hooks may be set before it starts:

    ``prepare(member, key)`` runs before every task and is quick when there is nothing to do;
    ``accepts(info)`` returns why a later actor cannot be used beside the others, or None;
    ``lost_by(error)`` returns why an error that a method raised means that its actor is lost as
    well, or None.
    """

    def __init__(
        self,
        kind: str,
        spawn: Spawn,
        service: Service,
        event: Event,
        *,
        stateful: bool = False,
        start_deadline_s: float = START_DEADLINE_S,
        released: Callable[[str], None] = lambda actor: None,
        record: Callable[[Span], None] = lambda span: None,
        transport: Transport = RAY,
        gone: Gone = lambda actor, node: asyncio.get_running_loop().create_future(),
    ):
        """``released`` is called with the name of an actor that leaves for good, ``record`` with
        which actor had which task in hand and when. ``transport`` carries the calls. ``gone`` gives
        a future that is done when an actor's node is lost.
        """
        self.kind, self.service, self.event = kind, service, event
        self.prepare: Callable[[Member, object], Awaitable[None]] = _nothing
        self.accepts: Callable[[ActorInfo], str | None] = lambda info: None
        self.lost_by: Callable[[RayError], Awaitable[str | None]] | None = None
        self._stateful, self._transport = stateful, transport
        self._answers = Answers(kind, transport, service, record, self._why_lost)
        # hooks are looked up when they are needed: who made the pool sets them only afterwards
        self._sender = Sender(
            transport, self._answers, lambda member, key: self.prepare(member, key)
        )
        self._outcomes = Outcomes(kind, service, event, stateful)
        self.queue, self.failed = self._outcomes.queue, self._outcomes.failed
        self.supervisor = Supervisor(
            kind,
            transport,
            spawn,
            service,
            event,
            start_deadline_s,
            serve=self._serve,
            changed=self.queue.look_again,
            fail=self._outcomes.end,
            released=released,
            accepts=lambda info: self.accepts(info),
            gone=gone,
            stranded=self._stranded,
        )
        self._replacements = BackgroundTasks()  # those that no slot waits for

    async def start(self) -> None:
        """Create every actor, wait until all answer, and open their slots."""
        await self.supervisor.start()

    async def stop(self) -> None:
        """Close the slots and kill the actors."""
        # first: one that went on would start an actor after all of them were killed
        await self._replacements.end()
        await self.supervisor.stop()

    async def renew(self, why: str) -> None:
        """Put a new actor in every place and accept calls again. Raises RunFailed when one does not
        start.
        """
        await self.supervisor.renew(why)
        # only now: a call that comes meanwhile is of the iteration that is being given up
        self._outcomes.reopen()

    @property
    def members(self) -> list[Member]:
        """By rising index."""
        return self.supervisor.members

    @property
    def alive(self) -> int:
        """Members in service now."""
        return self.supervisor.alive

    @property
    def reissued(self) -> int:
        """Times that a task was sent again."""
        return self._outcomes.reissued

    # ---- calls

    async def perform(self, task: AnyTask, call: Call) -> Answer:
        """The answer of some actor. ``Task.accept`` may refuse it: then the task is tried again,
        on another actor where there is one. Raises as ``Caller.perform``.
        """
        self._outcomes.check()
        pending = PendingTask(task, call)
        self._outcomes.put(pending)
        return await pending.future

    async def perform_on(self, member: Member, task: AnyTask, call: Call) -> Answer:
        """The answer of one particular actor, past the queue. Raises as ``Caller.perform``."""
        self._outcomes.check()
        pending = PendingTask(task, call)
        # no slot has it, so it counts for itself among what keeps the member busy
        await self._work(member, pending, pending)
        return await pending.future

    async def each(self, do: Callable[[Member], Awaitable[None]]) -> None:
        """Run ``do`` for every actor, all at once. An actor that is lost on the way, or raises, is
        replaced. Actors that are being replaced now are left out: they are prepared before their
        first task.
        """

        async def one(member: Member) -> None:
            if member.handle is None:
                return
            # only the present actor's loss counts; a successor's is found by its own first task
            incarnation = member.incarnation
            try:
                async with member.lock:
                    # it may have been lost while this waited for the lock
                    if member.handle is not None:
                        await do(member)
            except (ActorLost, RayError) as loss:
                why = str(loss) if isinstance(loss, ActorLost) else cause(loss)
                self._replacements.start(self._replace(member, incarnation, why))

        # ``one`` does not raise for a loss, so that the other actors are still told
        await asyncio.gather(*(one(member) for member in self.members if member.serving))

    async def ask(
        self, member: Member, method: Method[P, R], *args: P.args, **named: P.kwargs
    ) -> R:
        """A call to one particular actor that is not tried again, and may be part of a task.

        Raises ActorLost when it dies or hangs, RayError for what the method raises.
        """
        call = Call(method.__name__, args, named)
        refs = self._transport.send(member.handle, call)
        return cast(R, await self._answers.of(member, (method.__name__,), 0, refs[0]))

    def put(self, value: R) -> ObjectRef[R]:
        """``value`` in the object store, to be an argument of many calls."""
        return self._transport.put(value)

    # ---- tasks

    async def _serve(self, member: Member) -> None:
        # the task itself stands for the slot: ``Member.idle_slots`` tells by it which may be
        # cancelled
        slot, fits = asyncio.current_task(), partial(self._may_take, member)
        while member.serving:
            await self._work(member, await self.queue.take(fits, member), slot)

    def _may_take(self, member: Member, pending: PendingTask) -> bool:
        """Whether the member may have the task. A member without an actor takes nothing."""
        if member.handle is None:
            return False
        # where no other is left, one more try here is better than none
        return pending.avoid != member.index or not any(
            other.handle is not None and other.serving
            for other in self.members
            if other is not member
        )

    async def _work(self, member: Member, pending: PendingTask, who: object) -> None:
        member.begin_task(who)
        try:
            await self._handle(member, pending)
        except Exception as error:
            pending.fail(self._break(str(pending.task.key), error))
        finally:
            member.end_task(who)

    async def _handle(self, member: Member, pending: PendingTask) -> None:
        if pending.future.done():  # its caller was cancelled while it waited
            return
        try:
            value = await self._sender.attempt(member, pending)
        except Vacant:  # it was never sent, so nothing is counted
            self._outcomes.put(pending)
        except ActorLost as loss:
            # with a state, another actor could not answer it: all goes back to a checkpoint
            if self._stateful:
                self._lose_state(member, pending, str(loss))
                return
            blamed = member.blames(pending, loss)
            # also when another task is to blame: two tasks that each kill an actor, sent together
            # again, could be blamed for each other until the pool has used its restarts
            pending.alone = True
            # before the replacement, which takes as long as a start: others may take the task now
            (self._outcomes.count_failure if blamed else self._outcomes.retry)(
                pending, member, str(loss)
            )
            # in this slot: what it would take next could not be sent before the place is filled
            await self.supervisor.replace(member, pending.incarnation, str(loss))
        # no actor could do better: what the task names is gone, or the run itself is wrong
        except (InputsLost, RunFailed) as end:
            member.answer(pending)
            pending.fail(end)
        except RayError as error:
            member.answer(pending)
            if isinstance(getattr(error, "cause", None), OutOfMemoryError):
                pending.fail(RunFailed(cause(error)))  # the same task needs as much elsewhere
                return
            self._outcomes.count_failure(pending, member, cause(error))
        else:
            self._outcomes.answered(pending, member, value)

    async def _why_lost(self, error: RayError) -> str | None:
        return await self.lost_by(error) if self.lost_by else None

    # ---- failures

    def _lose_state(self, member: Member, pending: PendingTask, why: str) -> None:
        """The actor's state is gone: this task, those that wait and those to come fail, until the
        pool is renewed. Of several reports of one loss only the first is written down.
        """
        pending.fail(StateLost(f"the {self.kind} was lost: {why}"))
        self._discard(member, pending.incarnation, why)

    def _stranded(self, member: Member, incarnation: int, why: str) -> None:
        if self._stateful:
            self._discard(member, incarnation, why)
        else:
            self._replacements.start(self._replace(member, incarnation, why))

    async def _replace(self, member: Member, incarnation: int, why: str) -> None:
        try:
            await self.supervisor.replace(member, incarnation, why)
        except Exception as error:
            # no task waits for it that could raise it, and those to come would find nobody
            self._break(f"{self.supervisor.name(member)} is replaced", error)

    def _break(self, during: str, error: Exception) -> RunFailed:
        """A full disk, a defect: all tasks fail, as nothing may be waited for without end."""
        failure = RunFailed(f"{self.kind}: {during}: {type(error).__name__}: {error}")
        self._outcomes.end(failure)
        return failure

    def _discard(self, member: Member, incarnation: int, why: str) -> None:
        # what was sent will not be answered, and a successor must not be blamed for it
        member.forget_sent()
        # others report the same loss later, when a successor may be in its place
        if member.incarnation == incarnation:
            self.supervisor.discard(member, why)
            self._outcomes.end(StateLost(f"the {self.kind} was lost: {why}"))


async def _nothing(member: Member, key: object) -> None: ...
