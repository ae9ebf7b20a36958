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
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import cast

from ray import ObjectRef
from ray.exceptions import RayError

from actors.calls import Answer, AnyTask, Call, Caller, Method, P, R
from actors.messages import ActorInfo
from cluster.runtime.answers import Answers
from cluster.runtime.member import ActorLost, Member, Vacant
from cluster.runtime.queue import PendingTask, TaskQueue
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
        self.prepare: Callable[[Member, object], Awaitable[None]] | None = None
        self.accepts: Callable[[ActorInfo], str | None] = lambda info: None
        self.lost_by: Callable[[RayError], Awaitable[str | None]] | None = None
        self._stateful, self._transport = stateful, transport
        self._answers = Answers(kind, transport, service, record, self._why_lost)
        self.queue = TaskQueue()
        self.supervisor = Supervisor(
            kind,
            transport,
            spawn,
            service,
            event,
            start_deadline_s,
            serve=self._serve,
            changed=self.queue.look_again,
            fail=self._end,
            released=released,
            # asked when it is needed: who made the pool sets the hook only afterwards
            accepts=lambda info: self.accepts(info),
            gone=gone,
            stranded=self._stranded,
        )
        self._replacements = BackgroundTasks()  # those that no slot waits for
        self.reissued = 0
        self.failure: RunFailed | StateLost | None = None
        self.failed = asyncio.Event()

    async def start(self) -> None:
        """Create every actor, wait until all answer, and open their slots."""
        await self.supervisor.start()

    async def stop(self) -> None:
        """Close the slots and kill the actors."""
        await self._replacements.end()
        await self.supervisor.stop()

    async def renew(self, why: str) -> None:
        """Put a new actor in every place and accept calls again. Raises RunFailed when one does not
        start.
        """
        await self.supervisor.renew(why)
        # only now: a call that comes meanwhile is of the iteration that is being given up
        self.failure = None
        self.failed.clear()

    @property
    def members(self) -> list[Member]:
        """By rising index."""
        return self.supervisor.members

    @property
    def alive(self) -> int:
        """Members in service now."""
        return self.supervisor.alive

    # ---- calls

    async def perform(self, task: AnyTask, call: Call) -> Answer:
        """The answer of some actor. ``Task.accept`` may refuse it: then the task is tried again,
        on another actor where there is one. Raises as ``Caller.perform``.
        """
        # at once, rather than queued: nobody would ever take it
        if self.failure:
            raise self.failure
        pending = PendingTask(task, call)
        self._put(pending)
        return await pending.future

    async def perform_on(self, member: Member, task: AnyTask, call: Call) -> Answer:
        """The answer of one particular actor, past the queue. Raises as ``Caller.perform``."""
        if self.failure:
            raise self.failure
        pending = PendingTask(task, call)
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
                self._replacements.start(self.supervisor.replace(member, incarnation, why))

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

    def _put(self, pending: PendingTask) -> None:
        # the queue was emptied when the pool failed: what comes back after that must not wait
        # for a renewal, with a caller who has given up
        if self.failure:
            pending.fail(self.failure)
        else:
            self.queue.put(pending)

    async def _serve(self, member: Member) -> None:
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
            # a full disk, a defect: nothing may wait for this task for ever
            failure = RunFailed(f"{self.kind}: {pending.task.key}: {type(error).__name__}: {error}")
            pending.fail(failure)
            self._end(failure)
        finally:
            member.end_task(who)

    async def _handle(self, member: Member, pending: PendingTask) -> None:
        if pending.future.done():  # its caller was cancelled while it waited
            return
        try:
            value = await self._attempt(member, pending)
        except Vacant:
            self._put(pending)
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
            (self._count_failure if blamed else self._retry)(pending, member, str(loss))
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
            self._count_failure(pending, member, cause(error))
        else:
            self._answered(pending, member, value)

    async def _attempt(self, member: Member, pending: PendingTask) -> Answer:
        # a task that goes alone holds this lock until it is answered, so that nothing is sent after
        # it; all others only while they are sent, so that the next one waits at the actor
        async with member.sending:
            if pending.alone:
                # what was sent before it could kill the actor as well, and be taken for its fault
                await member.drained()
            refs = await self._send(member, pending)
            if pending.alone:
                return await self._result(member, pending, refs)
        return await self._result(member, pending, refs)

    async def _send(self, member: Member, pending: PendingTask) -> Sequence[ObjectRef[Answer]]:
        async with member.lock:  # not while the actor is replaced, or prepared for another task
            pending.incarnation = member.incarnation
            if member.handle is None:
                raise Vacant("the actor is being replaced")
            if self.prepare:
                await self.prepare(member, pending.task.key)
            refs = self._transport.send(member.handle, pending.call)
            # no await after the sending: blame goes by this list, which must have the actor's order
            member.send(pending)
        return refs

    async def _result(
        self, member: Member, pending: PendingTask, refs: Sequence[ObjectRef[Answer]]
    ) -> Answer:
        # the first value says how the call ended; the others stay where they are, as references
        first = await self._answers.of(member, pending.task.key, pending.retries, refs[0])
        return (first, *refs[1:]) if pending.call.returns > 1 else first

    async def _why_lost(self, error: RayError) -> str | None:
        return await self.lost_by(error) if self.lost_by else None

    def _answered(self, pending: PendingTask, member: Member, value: Answer) -> None:
        member.answered += 1
        member.answer(pending)
        # whatever had to be compiled is compiled now
        member.cold = False
        pending.answers += 1
        task = pending.task
        fault = task.accept(value) if task.accept else None
        # the last answer stands whatever it is: the caller counts what is missing in it
        if fault and pending.answers < task.tries:
            pending.avoid = member.index
            self._retry(pending, member, fault)
        elif not pending.future.done():
            pending.future.set_result(value)
            if pending.retries:
                told = {"actor": member.index, "retries": pending.retries}
                self.event("chunk_recovered", kind=self.kind, unit=str(task.key), **told)

    # ---- failures

    def _count_failure(self, pending: PendingTask, member: Member, why: str) -> None:
        """Back to the queue, or the end of the run when the task has used its attempts."""
        pending.attempts += 1
        # another member shows whether the fault is the task's or the machine's
        pending.avoid = member.index
        # with a state a second try would begin from what the first one left behind
        if pending.attempts < (1 if self._stateful else self.service.max_attempts):
            self._retry(pending, member, why)
            return
        what = f"{self.kind}: {pending.task.key} failed {pending.attempts} times"
        pending.fail(RunFailed(f"{what}, last: {why}"))

    def _retry(self, pending: PendingTask, member: Member, why: str) -> None:
        self.reissued += 1
        pending.retries += 1
        key = str(pending.task.key)
        self.event("chunk_reissued", kind=self.kind, unit=key, actor=member.index, why=why)
        self._put(pending)

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
            self._replacements.start(self.supervisor.replace(member, incarnation, why))

    def _discard(self, member: Member, incarnation: int, why: str) -> None:
        # what was sent will not be answered, and a successor must not be blamed for it
        member.forget_sent()
        # others report the same loss later, when a successor may be in its place
        if member.incarnation == incarnation:
            self.supervisor.discard(member, why)
            self._end(StateLost(f"the {self.kind} was lost: {why}"))

    def _end(self, failure: RunFailed | StateLost) -> None:
        self.failure = failure
        self.failed.set()
        # after ``failure`` is set: what is put from now on fails by itself
        self.queue.fail_all(failure)
