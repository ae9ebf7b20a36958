"""What a pool is made of: units of work, and the places of the actors that do them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

VACANT_POLL_S = 0.05


@dataclass
class Unit:
    """A call ``method(*args)``; ``returns`` > 1 gives (value of the first, references of the
    others).
    """

    key: Any
    method: str
    args: tuple[Any, ...]
    returns: int = 1
    priority: tuple[int, ...] = ()
    attempts: int = 0  # failures that count against it
    reissues: int = 0  # times it went back to the queue
    accept: Callable[[Any], str | None] | None = (
        None  # says why an answer is worth another try elsewhere
    )
    tries: int = 1  # answers that may be refused by `accept`; the last one stands
    avoid: int | None = (
        None  # index of an actor that should not get it again, while there is another
    )
    # it was lost with an actor: nothing else goes to the next one beside it, so that a second loss
    # is its own
    alone: bool = False
    incarnation: int = -1  # of the actor that it was sent to last
    future: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Worker:
    """One place in the pool; ``handle`` is whoever fills it now."""

    def __init__(self, index: int):
        self.index = index
        self.incarnation = 0
        self.restarts = 0
        self.handle: Any = None
        self.facts: dict[str, Any] = {}
        self.state: Any = None  # what the pool's `prepare` remembers about this incarnation
        self.last_answer = 0.0
        self.busy_until = 0.0  # wall clock: when it was done with its last unit, for the timeline
        self.answered = 0  # units
        self.benched = False
        self.leaving = False
        self.lock = asyncio.Lock()  # replacing and preparing
        self.door = (
            asyncio.Lock()
        )  # sending; held by a unit that wants to be alone until it is answered
        self.slots: list[asyncio.Task[None]] = []
        self.refill: asyncio.Task[None] | None = (
            None  # the last time that the place was filled anew
        )
        self.sent: list[Unit] = []  # to this incarnation, not answered; it works on the first
        self._blamed: tuple[int, Unit | None] = (-1, None)
        self._busy: set[asyncio.Task[Any] | None] = set()
        self._worked, self._since = 0.0, 0.0

    @property
    def serving(self) -> bool:
        """Whether it may take another unit."""
        return not self.benched and not self.leaving

    @property
    def worked_s(self) -> float:
        """Seconds in which it had a unit in hand."""
        return self._worked + (time.monotonic() - self._since if self._busy else 0.0)

    async def manned(self) -> None:
        """Until somebody is there, or nobody will be any more."""
        while self.handle is None and self.serving:
            await asyncio.sleep(VACANT_POLL_S)

    def takes_unit(self) -> None:
        """The running slot has a unit in hand."""
        if not self._busy:
            self._since = time.monotonic()
        self._busy.add(asyncio.current_task())

    def lays_down_unit(self) -> None:
        """The running slot is done with it."""
        self._busy.discard(asyncio.current_task())
        if not self._busy:
            self._worked += time.monotonic() - self._since

    def done_with(self, unit: Unit) -> None:
        """The actor has answered a unit, whatever it said."""
        self.sent = [other for other in self.sent if other is not unit]

    async def empty(self) -> None:
        """Until everything that it was sent is answered or lost."""
        while self.sent:
            await asyncio.sleep(0.01)

    def blames(self, unit: Unit, incarnation: int) -> bool:
        """Whether the loss of ``incarnation`` counts against ``unit``: the actor was at it, or had
        none yet.
        """
        if self._blamed[0] < incarnation:
            self._blamed = (incarnation, self.sent[0] if self.sent else None)
            self.sent = []
        return self._blamed[0] == incarnation and (
            self._blamed[1] is None or self._blamed[1] is unit
        )

    def idle_slots(self) -> list[asyncio.Task[None]]:
        """Slots that wait for a unit."""
        return [slot for slot in self.slots if slot not in self._busy]


class ActorLost(Exception):
    """The actor died or hung with this unit in hand."""


class Vacant(ActorLost):
    """Nobody was there to take it."""
