"""A member of a pool: a place that successive actors fill, and what is known of the present one."""

from __future__ import annotations

import asyncio

from actors.messages import ActorInfo, WeightsId
from cluster.runtime import clock
from cluster.runtime.alarm import Alarm
from cluster.runtime.queue import PendingTask
from cluster.runtime.transport import RAY, Handle, Transport


class ActorLost(Exception):
    """The actor died or hung with this task in hand."""


class NodeLost(ActorLost):
    """The node that the actor was on is gone: no task is to blame."""


class Vacant(ActorLost):
    """No actor was there to take it."""


NOBODY = object()
"""To blame for a loss that is no task's fault; None stands for the task that was being sent."""


class Member:
    """A place; ``handle`` is the actor that fills it now, None while it is being replaced."""

    def __init__(self, index: int, transport: Transport = RAY):
        self.index, self._transport = index, transport
        self.incarnation = 0  # actors that were here before this one
        self.restarts = 0  # of those, the ones that were replaced because they were lost
        self.handle: Handle | None = None
        self.info: ActorInfo | None = None  # of the present actor, or of the last one
        self.gone: asyncio.Future[str] | None = None  # done when the present actor's node is lost
        self.cold = False  # its next answer may take as long as compiling takes
        self.weights: WeightsId | None = None  # published weights that the actor holds
        # where actors take turns, whether it was told that its own began; None: not known
        self.has_gpu: bool | None = False
        self.last_answer = 0.0  # monotonic
        self.busy_until = 0.0  # wall clock: when it was done with its last task, for the timeline
        self.answered = 0  # tasks
        self.benched = False
        self.leaving = False
        self.alarm = Alarm()
        self.lock = asyncio.Lock()  # replacing and preparing
        self.sending = asyncio.Lock()  # a task that goes alone keeps it until it is answered
        self.slots: list[asyncio.Task[None]] = []
        self.refill: asyncio.Task[None] | None = None  # the last time that the place was filled
        self._sent: list[PendingTask] = []  # not answered yet; the actor works on the first
        self._drained = asyncio.Event()
        self._drained.set()
        self._blamed: tuple[int, PendingTask | object | None] = (-1, None)
        self._busy: set[object] = set()  # slots, and who else has a task in hand
        self._busy_s, self._busy_since = 0.0, 0.0

    @property
    def serving(self) -> bool:
        """Whether it may take another task."""
        return not self.benched and not self.leaving

    @property
    def busy(self) -> bool:
        """Whether it has a task in hand."""
        return bool(self._busy)

    @property
    def busy_s(self) -> float:
        """Seconds in which it had a task in hand."""
        return self._busy_s + (clock.now() - self._busy_since if self._busy else 0.0)

    @property
    def idle_slots(self) -> list[asyncio.Task[None]]:
        """Slots that wait for a task."""
        return [slot for slot in self.slots if slot not in self._busy]

    # ---- the actor

    def fill(
        self, handle: Handle, info: ActorInfo, gone: asyncio.Future[str] | None = None
    ) -> None:
        """An actor is there; ``gone`` is done, with the reason, when its node is lost."""
        self.handle, self.info, self.cold = handle, info, bool(info.cold)
        self.gone = gone
        # being ready is an answer: the first task has its whole deadline
        self.last_answer = clock.now()

    def kill(self) -> None:
        """End the actor, if there is one. It takes its weights along."""
        if self.handle is not None:
            self._transport.kill(self.handle)
        self.handle = self.weights = None
        self.has_gpu = False

    # ---- its tasks

    def begin_task(self, who: object) -> None:
        """A slot, or what was given past the queue, has a task in hand."""
        # time with tasks in hand, counted once however many of its slots have one
        if not self._busy:
            self._busy_since = clock.now()
        self._busy.add(who)

    def end_task(self, who: object) -> None:
        """It is done with it."""
        self._busy.discard(who)
        if not self._busy:
            self._busy_s += clock.now() - self._busy_since

    @property
    def sent(self) -> int:
        """Tasks that the actor has and has not answered."""
        return len(self._sent)

    def send(self, pending: PendingTask) -> None:
        """The actor has a task."""
        self._sent.append(pending)
        self._drained.clear()

    def answer(self, pending: PendingTask) -> None:
        """The actor has answered a task, whatever it said."""
        self._keep([other for other in self._sent if other is not pending])

    def forget_sent(self) -> None:
        """Nothing that was sent will be answered any more."""
        self._keep([])

    async def drained(self) -> None:
        """Returns once everything that was sent is answered or lost."""
        await self._drained.wait()

    def _keep(self, sent: list[PendingTask]) -> None:
        self._sent = sent
        if not sent:
            self._drained.set()

    def blames(self, pending: PendingTask, loss: ActorLost) -> bool:
        """Whether the loss of the actor that ``pending`` was sent to counts against ``pending``.

        An actor does one thing after the other, so the first task that it had not answered killed
        it, and those behind it are innocent. Each of them reports the same loss, one by one: the
        first report settles, per incarnation, which task is to blame. With none in hand the actor
        died of what it was just being sent. That a node is lost is nobody's fault.
        """
        # the first report decides: later ones find ``_sent`` filled by the next actor already
        if self._blamed[0] < pending.incarnation:
            first = self._sent[0] if self._sent else None
            culprit = NOBODY if isinstance(loss, NodeLost) else first
            self._blamed = (pending.incarnation, culprit)
            self.forget_sent()
        incarnation, culprit = self._blamed
        return incarnation == pending.incarnation and culprit in (None, pending)
