"""Waiting for an actor's answer, with a deadline.

A wait ends with the answer, with what the method raised, or with the loss of the actor, of its node
or of an input. It never lasts for ever.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ray import ObjectRef
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from actors.calls import Answer
from cluster.runtime import clock
from cluster.runtime.member import ActorLost, Member, NodeLost
from cluster.runtime.starting import DIED, cause
from cluster.runtime.transport import Transport
from configs.services import Service
from records.errors import InputsLost, first_line
from records.timeline import Span, span_of

Value = TypeVar("Value")
AWAY_S = 1.0
"""If a timer fires this many seconds late, the driver itself was stopped (SIGSTOP, a machine that
slept), so that silence of an actor proves nothing.
"""


@dataclass(frozen=True)
class Answers:
    """Waits for the answers of one pool's actors and records each in the timeline."""

    kind: str
    transport: Transport
    service: Service
    record: Callable[[Span], None]
    why_lost: Callable[[RayError], Awaitable[str | None]]  # as ``ActorPool.lost_by``

    async def wait_for(
        self, member: Member, key: object, attempt: int, ref: ObjectRef[Answer]
    ) -> Answer:
        """Return the value of ``ref``, a call for the task ``key`` sent to the member's actor.

        Raises the same as ``answer_of``, and ActorLost if ``why_lost`` says that what the method
        raised means the loss of the actor.
        """
        try:
            return await self._timed(member, key, attempt, ref)
        # outside of the timing: ``why_lost`` may take seconds, during which the actor is idle
        except RayError as error:
            if why := await self.why_lost(error):
                raise ActorLost(why) from None
            raise

    async def _timed(
        self, member: Member, key: object, attempt: int, ref: ObjectRef[Answer]
    ) -> Answer:
        sent, incarnation, outcome = clock.wall(), member.incarnation, "failed"
        try:
            value = await answer_of(self.transport, member, ref, self.service)
            outcome = "done"
            return value
        except ActorLost:
            outcome = "lost"
            raise
        except asyncio.CancelledError:
            outcome = "stopped"
            raise
        finally:
            # an actor runs one task at a time: it started this one when it finished the previous
            started, member.busy_until = max(sent, member.busy_until), clock.wall()
            ended = member.busy_until
            self.record(
                span_of(self.kind, member.index, incarnation, key, attempt, started, ended, outcome)
            )


async def answer_of(
    transport: Transport, member: Member, ref: ObjectRef[Value], service: Service
) -> Value:
    """Return the value of ``ref``, a call that was sent to the member's actor.

    The deadline is ``service.deadline_s`` seconds after the actor's last answer, because an actor
    runs one task at a time and this call may be queued behind others. A ``cold`` actor has
    ``warm_up_s`` seconds more for its first task. If the driver was stopped meanwhile (SIGSTOP, a
    machine that slept), the wait starts again.

    Raises:
        ActorLost: the actor died, or did not answer before the deadline.
        NodeLost: the actor's node is lost.
        InputsLost: an object that the call needs no longer exists.
        RayError: what the method raised.
    """
    waiting, heard = _Waiting(transport.answer(ref), member, service), True
    member.alarm.watch(waiting, waiting.begin())
    try:
        return await waiting.answer
    except (ActorLost, asyncio.CancelledError):
        heard = False
        raise
    except DIED as error:
        raise ActorLost(cause(error)) from None
    except ObjectLostError as error:
        raise _inputs_lost(error) from None
    except RayTaskError as error:
        # a lost argument, or a lost object that the method itself asked for
        if isinstance(error.cause, ObjectLostError):
            raise _inputs_lost(error.cause) from None
        raise
    finally:
        member.alarm.forget(waiting)
        # an exception counts as an answer: an actor that raises is alive
        if heard:
            member.last_answer = clock.now()


class _Waiting(Generic[Value]):
    """A call's answer, which is settled here where it will not come."""

    __slots__ = ("_asked", "_gone", "_member", "_service", "answer")

    def __init__(self, answer: asyncio.Future[Value], member: Member, service: Service):
        self.answer, self._member, self._service = answer, member, service
        # bound now: the node of a later actor says nothing about this answer
        self._gone, self._asked = member.gone, clock.now()

    def begin(self) -> float:
        """Return the monotonic time of the first check."""
        # a node that is lost already will not wake anybody before the deadline
        if self._gone is not None and self._gone.done():
            return self.look(math.inf)
        return self._asked + self._limit

    def look(self, due: float) -> float:
        """See ``Watched``."""
        if self.answer.done():
            return math.inf
        if self._gone is not None and self._gone.done():
            self.answer.set_exception(NodeLost(self._gone.result()))
            return math.inf
        now = clock.now()
        if now > due + AWAY_S:
            self._asked = now
        # from the actor's last answer, not from sending: tasks queue up at the actor
        since, limit = max(self._asked, self._member.last_answer), self._limit
        if now - since >= limit:
            self.answer.set_exception(ActorLost(f"no answer for {limit:g} s"))
            return math.inf
        return since + limit

    @property
    def _limit(self) -> float:
        return self._service.deadline_s + (self._service.warm_up_s if self._member.cold else 0.0)


def _inputs_lost(error: ObjectLostError) -> InputsLost:
    return InputsLost(first_line(error))
