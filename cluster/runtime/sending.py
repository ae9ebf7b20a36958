"""One attempt at a task: an actor is prepared for it, sent the call, and its answer waited for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ray import ObjectRef

from actors.calls import Answer
from cluster.runtime.answers import Answers
from cluster.runtime.member import Member, Vacant
from cluster.runtime.queue import PendingTask
from cluster.runtime.transport import Transport


@dataclass(frozen=True)
class Sender:
    """Sends tasks to the actors of one pool."""

    transport: Transport
    answers: Answers
    prepare: Callable[[Member, object], Awaitable[None]]  # as ``ActorPool.prepare``

    async def attempt(self, member: Member, pending: PendingTask) -> Answer:
        """What the member's actor answers. Raises as ``Answers.of``, and Vacant."""
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
            # with the lock held: a loss must be told of the actor that it was sent to, not of its
            # successor
            pending.incarnation = member.incarnation
            if member.handle is None:
                raise Vacant("the actor is being replaced")
            await self.prepare(member, pending.task.key)
            refs = self.transport.send(member.handle, pending.call)
            # no await after the sending: blame goes by this list, which must have the actor's order
            member.send(pending)
        return refs

    async def _result(
        self, member: Member, pending: PendingTask, refs: Sequence[ObjectRef[Answer]]
    ) -> Answer:
        # the first value says how the call ended; the others stay where they are, as references
        first = await self.answers.of(member, pending.task.key, pending.retries, refs[0])
        return (first, *refs[1:]) if pending.call.returns > 1 else first
