"""The tasks of a pool that wait for an actor."""

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
    """A task, and what has become of it so far."""

    task: AnyTask
    call: Call
    attempts: int = 0  # failures that count against it
    retries: int = 0  # times it went back to the queue
    answers: int = 0  # answers it got, whether accepted or not
    avoid: int | None = None  # member that should not get it again, while there is another
    # It was lost with an actor. Nothing else is sent to the next actor beside it, so that a second
    # loss is certainly its own.
    alone: bool = False
    incarnation: int = -1  # of the actor that it was sent to last
    future: asyncio.Future[Answer] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def fail(self, error: Exception) -> None:
        """Settle it, unless it is settled already."""
        if not self.future.done():
            self.future.set_exception(error)


class Holder(Protocol):
    """Who has a slot, or several."""

    @property
    def busy(self) -> bool:
        """Whether it has a task in hand."""
        ...


Fits = Callable[[PendingTask], bool]
Slots = dict[asyncio.Future[PendingTask], tuple[Fits, Holder | None]]


class TaskQueue:
    """Lowest priority first, then first come first served, to the slot that has waited longest of
    holders with nothing in hand. Only where there is none, a holder gets a second task, to have it
    there when it is done with the first.

    Not ``asyncio.PriorityQueue``: that would hand a task to a member that must not take it, which
    could only put it back and look again after a while. A task goes to one slot, and the others
    sleep on: with a thousand actors, waking all for each task would take all of the driver's time.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[int, ...], int, PendingTask]] = []  # sorted
        # slots that wait, in the order of their coming: those whose holders had nothing in hand
        # when they were last looked at, and the others
        self._idle: Slots = {}
        self._more: Slots = {}
        self._order = itertools.count()
        self._looking: asyncio.Handle | None = None
        self.deepest = 0  # most tasks that waited since this was set back

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, pending: PendingTask) -> None:
        """Add a task, new or tried before."""
        # the number in the middle never repeats, so tasks themselves are never compared
        bisect.insort(self._waiting, (pending.task.priority, next(self._order), pending))
        self.deepest = max(self.deepest, len(self._waiting))
        self.look_again()

    def look_again(self) -> None:
        """Who may take what has changed, as when an actor came or went. All that is put in one turn
        of the event loop is given out after it, in order.
        """
        if (self._idle or self._more) and self._looking is None:
            self._looking = asyncio.get_running_loop().call_soon(self._look)

    async def take(self, fits: Fits, holder: Holder | None = None) -> PendingTask:
        """The first task that ``fits``, once there is one, for a slot of ``holder``."""
        # a task that this slot must not take is passed over, and does not hold up what is behind it
        for place, (_, _, pending) in enumerate(self._waiting):
            if fits(pending):
                del self._waiting[place]
                return pending
        taker: asyncio.Future[PendingTask] = asyncio.get_running_loop().create_future()
        # as if its holder had nothing in hand: ``_taker`` looks when there is a task to give
        self._idle[taker] = fits, holder
        try:
            return await taker
        except asyncio.CancelledError:
            if taker.done() and not taker.cancelled():
                self.put(taker.result())  # it came too late
            raise
        finally:
            # from both: ``_taker`` may have moved it meanwhile
            self._idle.pop(taker, None)
            self._more.pop(taker, None)

    def fail_all(self, error: Exception) -> None:
        """Settle every task that waits."""
        while self._waiting:
            self._waiting.pop()[2].fail(error)

    def _look(self) -> None:
        """Give out what can be given."""
        self._looking = None
        left: list[tuple[tuple[int, ...], int, PendingTask]] = []
        seen = 0  # what is behind them stays where it is: thousands may wait
        given: set[Holder | None] = set()  # who does not know yet that it has a task in hand
        # from the front, and not by slot: the order of the tasks decides, as it does for ``take``
        for row in self._waiting:
            if not (self._idle or self._more):
                break
            seen += 1
            taker = self._taker(row[2], given)
            if taker is None:
                left.append(row)
                continue
            slots = self._idle if taker in self._idle else self._more
            _, holder = slots.pop(taker)
            if taker.done():  # cancelled in this very turn
                left.append(row)
                self.look_again()
            else:
                taker.set_result(row[2])
                given.add(holder)
        self._waiting[:seen] = left

    def _taker(
        self, pending: PendingTask, given: set[Holder | None]
    ) -> asyncio.Future[PendingTask] | None:
        """The slot that gets the task, if there is one."""
        found, busy = None, list[asyncio.Future[PendingTask]]()
        for taker, (fits, holder) in self._idle.items():
            if holder is not None and (holder in given or holder.busy):
                busy.append(taker)
            elif fits(pending):
                found = taker
                break
        # once for each wait: with a thousand actors, to pass over them for every task would take
        # too long. When its holder is idle again, the slot that was at work waits among the first.
        for taker in busy:
            self._more[taker] = self._idle.pop(taker)
        if found is not None:
            return found
        return next((taker for taker, (fits, _) in self._more.items() if fits(pending)), None)
