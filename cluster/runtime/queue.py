"""The queue of a pool: tasks that wait for an actor."""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from actors.calls import Answer, AnyTask, Call


@dataclass(eq=False)
class PendingTask:
    """A task with its attempts so far and the future of its answer."""

    task: AnyTask
    call: Call
    attempts: int = 0  # failures that count against it
    retries: int = 0  # times it was put back into the queue
    answers: int = 0  # answers it got, whether accepted or not
    avoid: int | None = None  # member that should not get it again if there is another one
    # True once it was lost with an actor. The next actor gets no other task beside it, so that a
    # second loss is certainly caused by this task.
    alone: bool = False
    incarnation: int = -1  # of the actor that it was last sent to
    future: asyncio.Future[Answer] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def fail(self, error: Exception) -> None:
        """Set ``error`` as the result unless the task already has one."""
        if not self.future.done():
            self.future.set_exception(error)


class Holder(Protocol):
    """Owner of slots: a member."""

    @property
    def busy(self) -> bool:
        """True while it has a task."""
        ...


Fits = Callable[[PendingTask], bool]
Slots = dict[asyncio.Future[PendingTask], tuple[Fits, Holder | None]]


class TaskQueue:
    """Priority queue that assigns each task to one waiting slot.

    The lowest priority value comes first, then the task that was put first. A task goes to the slot
    that has waited longest among holders without a task. Only if every waiting holder is busy does
    one get a second task, so that it can start on it as soon as it has finished the first.

    ``asyncio.PriorityQueue`` would not do: it would give a task to a member that must not take it,
    and that member could only put it back and poll. Only the slot that gets the task is woken; with
    a thousand actors, waking all of them for every task would take all of the driver's time.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[int, ...], int, PendingTask]] = []  # sorted
        # waiting slots in order of arrival: those whose holders were idle when last looked at, and
        # those whose holders were busy
        self._idle: Slots = {}
        self._more: Slots = {}
        self._order = itertools.count()
        self._looking: asyncio.Handle | None = None
        self.max_length = 0  # largest number of waiting tasks since this was last reset

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, pending: PendingTask) -> None:
        """Add a task: a new one, or one to be retried."""
        # the number in the middle is unique, so that tasks themselves are never compared
        bisect.insort(self._waiting, (pending.task.priority, next(self._order), pending))
        self.max_length = max(self.max_length, len(self._waiting))
        self.schedule_assignment()

    def schedule_assignment(self) -> None:
        """Schedule another assignment of tasks to slots, as after an actor came or went.

        Assignment runs once, after the present iteration of the event loop, so that all tasks that
        were put in that iteration are assigned in order.
        """
        if (self._idle or self._more) and self._looking is None:
            self._looking = asyncio.get_running_loop().call_soon(self._look)

    async def take(self, fits: Fits, holder: Holder | None = None) -> PendingTask:
        """Wait for a task for a slot of ``holder``, and return the first for which ``fits``."""
        # a task that this slot must not take is skipped and does not block those behind it
        for place, (_, _, pending) in enumerate(self._waiting):
            if fits(pending):
                del self._waiting[place]
                return pending
        taker: asyncio.Future[PendingTask] = asyncio.get_running_loop().create_future()
        # assume an idle holder: ``_taker`` checks when there is a task to assign
        self._idle[taker] = fits, holder
        try:
            return await taker
        except asyncio.CancelledError:
            if taker.done() and not taker.cancelled():
                self.put(taker.result())  # cancelled after the assignment: the task goes back
            raise
        finally:
            # from both, as ``_taker`` may have moved it
            self._idle.pop(taker, None)
            self._more.pop(taker, None)

    def fail_all(self, error: Exception) -> None:
        """Remove every waiting task and set ``error`` as its result."""
        while self._waiting:
            self._waiting.pop()[2].fail(error)

    def _look(self) -> None:
        """Assign waiting tasks to waiting slots."""
        self._looking = None
        left: list[tuple[tuple[int, ...], int, PendingTask]] = []
        seen = 0  # rows behind these are not touched: thousands of tasks may wait
        served: set[Holder | None] = set()  # got a task here, but ``busy`` does not show it yet
        # iterate over tasks, not slots: the order of the tasks decides, as it does in ``take``
        for row in self._waiting:
            if not (self._idle or self._more):
                break
            seen += 1
            taker = self._taker(row[2], served)
            if taker is None:
                left.append(row)
                continue
            slots = self._idle if taker in self._idle else self._more
            _, holder = slots.pop(taker)
            if taker.done():  # cancelled in this iteration of the event loop
                left.append(row)
                self.schedule_assignment()
            else:
                taker.set_result(row[2])
                served.add(holder)
        self._waiting[:seen] = left

    def _taker(
        self, pending: PendingTask, served: set[Holder | None]
    ) -> asyncio.Future[PendingTask] | None:
        """Return the slot that gets the task, or None if no waiting slot may take it."""
        chosen, busy = None, list[asyncio.Future[PendingTask]]()
        for taker, (fits, holder) in self._idle.items():
            if holder is not None and (holder in served or holder.busy):
                busy.append(taker)
            elif fits(pending):
                chosen = taker
                break
        # each slot is moved at most once per wait; skipping busy holders again for every task would
        # take too long with a thousand actors. They need not be moved back: when the holder becomes
        # idle, the slot that finished its task waits among the idle ones.
        for taker in busy:
            self._more[taker] = self._idle.pop(taker)
        if chosen is not None:
            return chosen
        return next((taker for taker, (fits, _) in self._more.items() if fits(pending)), None)
