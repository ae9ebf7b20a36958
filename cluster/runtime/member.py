"""A member of a pool: a numbered place for an actor, with the state of the actor that it has now.

When the actor is lost, another one, the next incarnation, takes the place.
"""

from __future__ import annotations

import asyncio

from actors.messages import ActorInfo, WeightsId
from cluster.runtime import clock
from cluster.runtime.alarm import Alarm
from cluster.runtime.queue import PendingTask
from cluster.runtime.transport import RAY, Handle, Transport


class ActorLost(Exception):
    """The actor died or hung before it answered this task."""


class NodeLost(ActorLost):
    """The actor's node is lost, so no task is to blame."""


class Vacant(ActorLost):
    """The member had no actor to send the task to."""


NOBODY = object()
"""Culprit of a loss for which no task is to blame. None means the task that was being sent."""


class Member:
    """A member; ``handle`` is its present actor, or None while the actor is being replaced."""

    def __init__(self, index: int, transport: Transport = RAY):
        self.index, self._transport = index, transport
        self.incarnation = 0  # number of earlier actors of this member
        self.restarts = 0  # how many of them were replaced because they were lost
        self.handle: Handle | None = None
        self.info: ActorInfo | None = None  # of the present actor, or of the previous one
        self.gone: asyncio.Future[str] | None = None  # done when the present actor's node is lost
        self.cold = False  # its next answer may include compilation and take as long
        self.weights: WeightsId | None = None  # published weights that the actor has loaded
        # if actors take turns on a GPU: whether its turn was announced to it; None if not known
        self.has_gpu: bool | None = False
        self.last_answer = 0.0  # monotonic seconds
        self.busy_until = 0.0  # wall-clock time at which it finished its last task
        self.answered = 0  # number of tasks
        self.benched = False
        self.leaving = False
        self.alarm = Alarm()
        self.lock = asyncio.Lock()  # held while the actor is replaced or prepared
        self.sending = asyncio.Lock()  # a task that is sent alone holds it until it is answered
        self.slots: list[asyncio.Task[None]] = []
        self.refill: asyncio.Task[None] | None = None  # starts the present actor
        self._sent: list[PendingTask] = []  # unanswered tasks; the actor works on the first
        self._drained = asyncio.Event()
        self._drained.set()
        self._blamed: tuple[int, PendingTask | object | None] = (-1, None)
        self._busy: set[object] = set()  # slots and direct callers that have a task
        self._busy_s, self._busy_since = 0.0, 0.0

    @property
    def serving(self) -> bool:
        """True if it may take another task."""
        return not self.benched and not self.leaving

    @property
    def busy(self) -> bool:
        """True while it has a task."""
        return bool(self._busy)

    @property
    def busy_s(self) -> float:
        """Seconds during which it had at least one task."""
        return self._busy_s + (clock.now() - self._busy_since if self._busy else 0.0)

    @property
    def idle_slots(self) -> list[asyncio.Task[None]]:
        """Slots that are waiting for a task."""
        return [slot for slot in self.slots if slot not in self._busy]

    # ---- the actor

    def fill(
        self, handle: Handle, info: ActorInfo, gone: asyncio.Future[str] | None = None
    ) -> None:
        """Set the new actor. ``gone`` gets the reason as its result when the node is lost."""
        self.handle, self.info, self.cold = handle, info, bool(info.cold)
        self.gone = gone
        # readiness counts as an answer, so that the first task gets its whole deadline
        self.last_answer = clock.now()

    def kill(self) -> None:
        """Kill the actor, if there is one; its weights are gone with it."""
        if self.handle is not None:
            self._transport.kill(self.handle)
        self.handle = self.weights = None
        self.has_gpu = False

    # ---- its tasks

    def begin_task(self, who: object) -> None:
        """Record that ``who``, a slot or a call that bypasses the queue, has a task."""
        # busy time counts once, however many slots have a task
        if not self._busy:
            self._busy_since = clock.now()
        self._busy.add(who)

    def end_task(self, who: object) -> None:
        """Record that ``who`` has finished its task."""
        self._busy.discard(who)
        if not self._busy:
            self._busy_s += clock.now() - self._busy_since

    @property
    def sent(self) -> int:
        """Number of tasks that were sent to the actor and not answered yet."""
        return len(self._sent)

    def send(self, pending: PendingTask) -> None:
        """Record that a task was sent to the actor."""
        self._sent.append(pending)
        self._drained.clear()

    def answer(self, pending: PendingTask) -> None:
        """Record that the actor answered a task, with a result or an error."""
        self._keep([other for other in self._sent if other is not pending])

    def forget_sent(self) -> None:
        """Drop all sent tasks: none of them will be answered."""
        self._keep([])

    async def drained(self) -> None:
        """Wait until every sent task is answered or lost."""
        await self._drained.wait()

    def _keep(self, sent: list[PendingTask]) -> None:
        self._sent = sent
        if not sent:
            self._drained.set()

    def blames(self, pending: PendingTask, loss: ActorLost) -> bool:
        """Return True if the loss of the actor counts against ``pending``, which it was sent.

        An actor runs one task at a time in order, so the first unanswered task killed it and the
        tasks behind it are innocent. Each of them reports the same loss, so the first report per
        incarnation determines the culprit. If no task was unanswered, the actor died of the one
        that was being sent to it. No task is to blame for the loss of a node.
        """
        # only the first report: later ones may find tasks of the next actor in ``_sent``
        if self._blamed[0] < pending.incarnation:
            first = self._sent[0] if self._sent else None
            culprit = NOBODY if isinstance(loss, NodeLost) else first
            self._blamed = (pending.incarnation, culprit)
            self.forget_sent()
        incarnation, culprit = self._blamed
        return incarnation == pending.incarnation and culprit in (None, pending)
