"""A pool of identical actors that pull tasks from one queue and are replaced when they fail.

Every service uses it: rollout, reward, selector, encoder and learner. A task is a method call that
may be repeated. Each actor has ``in_flight`` slots that pull from the queue. An actor that dies or
hangs is killed and replaced, and every task that it held goes back to the queue; retries per task
and restarts per actor are limited. No result is counted twice, because a task has one future and
only the first answer sets it.

A pool can grow and shrink while it works: a new actor starts to pull tasks, and an actor that is
removed first finishes those it holds. The learner, which has state, is ``stateful``: its tasks are
not retried, and after a loss every call fails with StateLost until the pool is renewed.
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
from cluster.runtime.sender import Sender
from cluster.runtime.starting import READY, Gone, Spawn, cause
from cluster.runtime.supervisor import Supervisor
from cluster.runtime.tasks import BackgroundTasks
from cluster.runtime.transport import RAY, Handle, Transport
from configs.services import Service
from records.errors import InputsLost, OutOfMemoryError, RunFailed, StateLost
from records.rundir import Event
from records.timeline import Span

START_DEADLINE_S = 600.0


class ActorPool(Caller):
    """Pool of actors of one service, see the module.

    Hooks that are set before it starts: ``prepare(member, key)`` runs before every task,
    ``accepts(info)`` returns why an actor that joins later does not match the others, and
    ``lost_by(error)`` why an error of a method means that its actor is lost; else both return None.
    ``on_state_stranded(why)`` is called if a stateful actor is lost and perhaps no call reports it.
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
        """Create a pool of ``kind``; ``spawn`` creates an actor from its name.

        ``released`` is called with the name of an actor that is removed for good, and ``record``
        with the span of time during which an actor worked on a task. ``transport`` sends the calls.
        ``gone`` returns a future that is done when an actor's node is lost.
        """
        self.kind, self.service, self.event = kind, service, event
        self.prepare: Callable[[Member, object], Awaitable[None]] = _nothing
        self.accepts: Callable[[ActorInfo], str | None] = lambda info: None
        self.lost_by: Callable[[RayError], Awaitable[str | None]] | None = None
        self.on_state_stranded: Callable[[str], None] = lambda why: None
        self._stateful, self._transport = stateful, transport
        self._answers = Answers(kind, transport, service, record, self._why_lost)
        # look up hooks when they are called, as they are set after construction
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
            on_change=self.queue.schedule_assignment,
            on_failure=self._outcomes.end,
            on_release=released,
            accepts=lambda info: self.accepts(info),
            gone=gone,
            on_node_lost=self._stranded,
        )
        self._replacements = BackgroundTasks()  # replacements that no slot waits for

    async def start(self) -> None:
        """Create every actor, wait until all answer, and open their slots."""
        await self.supervisor.start()

    async def stop(self) -> None:
        """Close the slots and kill the actors."""
        # first: a running replacement would start an actor after all others were killed
        await self._replacements.end()
        await self.supervisor.stop()

    async def renew(self, why: str) -> None:
        """Replace all actors and accept calls again. Raises RunFailed if one does not start."""
        await self.supervisor.renew(why)
        # only now: calls made during the renewal belong to the iteration that is being abandoned
        self.reopen()

    def reopen(self) -> None:
        """Accept calls again, after all actors were replaced."""
        self._outcomes.reopen()

    @property
    def members(self) -> list[Member]:
        """All members, by rising index."""
        return self.supervisor.members

    @property
    def alive(self) -> int:
        """Number of members that are in service."""
        return self.supervisor.alive

    @property
    def reissued(self) -> int:
        """Number of retries of all tasks."""
        return self._outcomes.reissued

    # ---- calls

    async def perform(self, task: AnyTask, call: Call) -> Answer:
        """Queue the task and return an actor's answer.

        If ``Task.accept`` rejects an answer, the task is retried, on another actor if there is one.
        Raises the same as ``Caller.perform``.
        """
        self._outcomes.check()
        pending = PendingTask(task, call)
        self._outcomes.put(pending)
        return await pending.future

    async def perform_on(self, member: Member, task: AnyTask, call: Call) -> Answer:
        """Send the task to one particular actor, bypassing the queue, and return its answer.

        Raises the same as ``Caller.perform``.
        """
        self._outcomes.check()
        pending = PendingTask(task, call)
        await self._work(member, pending, pending)  # without a slot, the task itself marks it busy
        return await pending.future

    async def each(self, do: Callable[[Member], Awaitable[None]]) -> None:
        """Run ``do`` for all actors concurrently.

        An actor that is lost meanwhile, or raises, is replaced. Actors that are being replaced now
        are skipped: they are prepared before their first task.
        """

        async def one(member: Member) -> None:
            if member.handle is None:
                return
            # a later report must not replace the next actor, whose own first task would show a loss
            incarnation = member.incarnation
            try:
                async with member.lock:
                    # it may have been lost while this waited for the lock
                    if member.handle is not None:
                        await do(member)
            except (ActorLost, RayError) as loss:
                why = self._outcomes.explain(member, "a call to all actors", loss)
                self._replacements.start(self._replace(member, incarnation, why))

        # ``one`` does not raise for a loss, so that ``do`` still runs for the other actors
        await asyncio.gather(*(one(member) for member in self.members if member.serving))

    async def ask(
        self, member: Member, method: Method[P, R], *args: P.args, **named: P.kwargs
    ) -> R:
        """Call a method of one particular actor, without retries; may be part of a task.

        Raises ActorLost if the actor dies or hangs, Vacant if there is none, and RayError for what
        the method raises.
        """
        if member.handle is None:  # its loss was noticed in between
            raise Vacant(f"{self.supervisor.name(member)} was lost")
        call = Call(method.__name__, args, named)
        refs = self._transport.send(member.handle, call)
        return cast(R, await self._answers.wait_for(member, (method.__name__,), 0, refs[0]))

    def put(self, value: R) -> ObjectRef[R]:
        """Put ``value`` into the object store, to pass it to many calls by reference."""
        return self._transport.put(value)

    # ---- tasks

    async def _serve(self, member: Member) -> None:
        # the asyncio task identifies the slot, so that ``Member.idle_slots`` finds idle ones
        slot, fits = asyncio.current_task(), partial(self._may_take, member)
        while member.serving:
            await self._work(member, await self.queue.take(fits, member), slot)

    def _may_take(self, member: Member, pending: PendingTask) -> bool:
        """Return True if the member may take the task; a member without an actor may not."""
        if member.handle is None:
            return False
        # with no other member left, a retry on the same one is better than none
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
        except Vacant:  # the task was never sent, so no attempt is counted
            self._outcomes.put(pending)
        except ActorLost as loss:
            # another actor lacks the state to answer: the run returns to a checkpoint
            if self._stateful:
                self._lose_state(member, pending, str(loss))
                return
            blamed = member.blames(pending, loss)
            # even if another task is to blame: if two tasks each kill their actor and are sent
            # together again, one could be blamed for the other until no restarts are left
            pending.alone = True
            # requeue before the replacement, which takes seconds: other actors may take it now
            (self._outcomes.count_failure if blamed else self._outcomes.retry)(
                pending, member, str(loss)
            )
            # awaited in this slot, which could not send another task before then anyway
            await self.supervisor.replace(member, pending.incarnation, str(loss))
        # no other actor could succeed: an input is lost, or the run itself is wrong
        except (InputsLost, RunFailed) as end:
            member.answer(pending)
            pending.fail(end)
        except RayError as error:
            member.answer(pending)
            if isinstance(getattr(error, "cause", None), OutOfMemoryError):
                pending.fail(RunFailed(cause(error)))  # it needs as much memory elsewhere
                return
            self._outcomes.raised(pending, member, error)
        else:
            self._outcomes.answered(pending, member, value)

    async def _why_lost(self, error: RayError) -> str | None:
        return await self.lost_by(error) if self.lost_by else None

    # ---- failures

    def report_ended(self) -> None:
        """Report the loss of actors that ended while they were idle: no call would report it.

        A service may wait for another one's idle actor (``ActorPlacement``), which a task that
        needs both never comes to call.
        """
        for member in self.supervisor.ended():
            self._replacements.start(self._report(member, member.handle, member.incarnation))

    async def _report(self, member: Member, handle: Handle, incarnation: int) -> None:
        try:
            # it raises why the actor ended
            await self._transport.answer(self._transport.send(handle, READY)[0])
        except RayError as error:
            if member.incarnation == incarnation:  # not reported meanwhile
                self._stranded(member, incarnation, f"{cause(error)} (it had no task)")

    def _lose_state(self, member: Member, pending: PendingTask, why: str) -> None:
        """Fail this task, and all others until the pool is renewed, as the state is lost.

        Only the first of several reports of one loss is recorded as an event.
        """
        pending.fail(StateLost(f"the {self.kind} was lost: {why}"))
        self._discard(member, pending.incarnation, why)

    def _stranded(self, member: Member, incarnation: int, why: str) -> None:
        if self._stateful:
            self._discard(member, incarnation, why)
            self.on_state_stranded(why)
        else:
            self._replacements.start(self._replace(member, incarnation, why))

    async def _replace(self, member: Member, incarnation: int, why: str) -> None:
        try:
            await self.supervisor.replace(member, incarnation, why)
        except Exception as error:
            # no task is waiting that could raise this, and later tasks would wait for ever
            self._break(f"{self.supervisor.name(member)} is replaced", error)

    def _break(self, during: str, error: Exception) -> RunFailed:
        """End the pool for an unexpected error, such as a full disk or a defect: all tasks fail."""
        failure = RunFailed(f"{self.kind}: {during}: {type(error).__name__}: {error}")
        failure.__cause__ = error  # its traceback is in the event ``run_failed``
        self._outcomes.end(failure)
        return failure

    def _discard(self, member: Member, incarnation: int, why: str) -> None:
        # sent tasks will not be answered, and the next actor must not be blamed for them
        member.forget_sent()
        # later reports of the same loss must not discard the next actor
        if member.incarnation == incarnation:
            self.supervisor.discard(member, why)
            self._outcomes.end(StateLost(f"the {self.kind} was lost: {why}"))


async def _nothing(member: Member, key: object) -> None: ...
