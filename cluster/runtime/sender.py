"""One attempt at a task: prepare the actor, send the call and wait for the answer."""

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
        """Return the answer of the member's actor.

        Raises the same as ``Answers.wait_for``, and Vacant if the member has no actor.
        """
        # a task that is sent alone holds this lock until it is answered, so that nothing is sent
        # after it; other tasks hold it only while they are sent, so that the actor can queue them
        async with member.sending:
            if pending.alone:
                # a task sent earlier could kill the actor, and this task would be blamed for it
                await member.drained()
            refs = await self._send(member, pending)
            if pending.alone:
                return await self._result(member, pending, refs)
        return await self._result(member, pending, refs)

    async def _send(self, member: Member, pending: PendingTask) -> Sequence[ObjectRef[Answer]]:
        async with member.lock:  # not while the actor is replaced or prepared for another task
            # read with the lock held: a loss must be reported for the actor that got the task
            pending.incarnation = member.incarnation
            if member.handle is None:
                raise Vacant("the actor is being replaced")
            await self.prepare(member, pending.task.key)
            refs = self.transport.send(member.handle, pending.call)
            # no await in between: blame relies on this list being in the order of sending
            member.send(pending)
        return refs

    async def _result(
        self, member: Member, pending: PendingTask, refs: Sequence[ObjectRef[Answer]]
    ) -> Answer:
        # the first value shows how the call ended; the others remain references
        first = await self.answers.wait_for(member, pending.task.key, pending.retries, refs[0])
        return (first, *refs[1:]) if pending.call.returns > 1 else first
