"""The members of a pool: their actors are started, replaced, benched, added and removed here.

Why not Ray's own ``max_restarts``: an actor that Ray restarts keeps its handle but has lost its
weights, and one that hangs is never restarted. With one path for both there is one thing to test.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from actors.messages import ActorInfo
from cluster.runtime.member import Member
from cluster.runtime.starting import Gone, Spawn, start_actor
from cluster.runtime.tasks import cancel_all, run_together
from cluster.runtime.transport import Transport
from configs.services import Service
from records.errors import RunFailed
from records.rundir import Event


@dataclass
class Supervisor:
    """Keeps the members of one kind in service."""

    kind: str
    transport: Transport
    spawn: Spawn
    service: Service
    event: Event
    start_deadline_s: float
    serve: Callable[[Member], Coroutine[None, None, None]]  # what each ``in_flight`` slot runs
    changed: Callable[[], None]  # called when an actor came or went
    fail: Callable[[RunFailed], None]  # called when no actor is left
    released: Callable[[str], None]  # called with the name of an actor that leaves for good
    accepts: Callable[[ActorInfo], str | None]  # what is wrong with an actor beside the others
    gone: Gone
    stranded: Callable[[Member, int, str], None]  # called when an incarnation's node is lost
    members: list[Member] = field(init=False)  # by rising index
    starting: int = field(default=0, init=False)  # new actors on their way
    lost: int = field(default=0, init=False)  # actors that died or hung since the pool was made

    def __post_init__(self) -> None:
        self.members = [Member(index, self.transport) for index in range(self.service.count)]
        # never given twice: events, the timeline and Ray's names tell actors apart by it
        self._next_index = len(self.members)
        self._removed_busy_s = 0.0

    async def start(self) -> None:
        """Create every actor, wait until all answer, and open their slots."""
        # together: where one does not start, none goes on starting after all were stopped
        await run_together(*(self._fill(member) for member in self.members))
        for member in self.members:
            self._open(member)

    async def stop(self) -> None:
        """Close the slots and kill the actors."""
        # the slots first: one that still ran would take the kill for a loss, and replace the actor
        await cancel_all([slot for member in self.members for slot in member.slots])
        self.kill()

    def kill(self) -> None:
        """Kill the actors that there are, each also where another's kill fails."""
        with contextlib.ExitStack() as kills:
            for member in reversed(self.members):  # the last one in goes first
                kills.callback(member.kill)

    @property
    def alive(self) -> int:
        """Members in service now."""
        return sum(member.serving for member in self.members)

    @property
    def busy_s(self) -> float:
        """Seconds in which actors had tasks in hand, summed over all that ever were."""
        return self._removed_busy_s + sum(member.busy_s for member in self.members)

    def name(self, member: Member) -> str:
        """``rollout-1``."""
        return f"{self.kind}-{member.index}"

    # ---- size

    def next_actors(self, count: int) -> list[str]:
        """Names that the next ``count`` new actors will have."""
        return [f"{self.kind}-{self._next_index + i}" for i in range(count)]

    async def resize(self, size: int) -> None:
        """Grow or shrink to ``size`` members in service; one call at a time. No task is lost.

        Raises RunFailed when a new actor does not start; those that did stay.
        """
        if size > self.alive:
            await self._grow(size - self.alive)
        else:
            leaving = [member for member in self.members if member.serving][size:]
            await asyncio.gather(*(self._remove(member) for member in leaving))

    async def _grow(self, count: int) -> None:
        members = [Member(self._next_index + i, self.transport) for i in range(count)]
        # before anything is waited for: ``next_actors`` must not name these again
        self._next_index += count
        self.starting = count

        async def join(member: Member) -> None:
            try:
                await self._fill(member, joins=True)
            except BaseException:
                # or the node would keep a place for it that nobody fills
                self.released(self.name(member))
                raise
            finally:
                self.starting -= 1
            # not before: what is told to all members would be told to one that cannot answer
            self.members.append(member)
            self._open(member)

        # all are waited for, though one failed: an actor that comes later would have no slots
        outcomes = await asyncio.gather(*map(join, members), return_exceptions=True)
        self.members.sort(key=lambda member: member.index)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                # the last member may have been benched in the hope of this one
                self._end_if_none_is_left(str(outcome))
                raise outcome

    async def _remove(self, member: Member) -> None:
        member.leaving = True
        for slot in member.idle_slots:
            slot.cancel()  # it waits for a task, so it holds none; the others finish theirs
        if member.refill is not None:
            # ``replace`` waits for it with the lock, which is needed below
            member.refill.cancel()
        await asyncio.gather(*member.slots, return_exceptions=True)
        async with member.lock:
            # with the lock: a replacement on its way would get its handle after the kill
            member.kill()
        self.members.remove(member)
        # what it did stays counted, or a pool that shrinks would seem to have been idle
        self._removed_busy_s += member.busy_s
        self.released(self.name(member))
        self._tell("actor_removed", member, units=member.answered)
        self.changed()

    # ---- replacement

    async def renew(self, why: str) -> None:
        """Put a new actor in every place, all at once. Raises RunFailed when one does not start."""

        async def one(member: Member) -> None:
            async with member.lock:
                if member.handle is not None:
                    self.discard(member, why)
                await self._fill(member)

        # not counted as restarts: the session counts its returns to a checkpoint
        await run_together(*map(one, self.members))

    async def replace(self, member: Member, incarnation: int, why: str) -> None:
        """Kill what is left of the actor and put another in its place.

        Once per incarnation: every task that the actor held reports the loss, and the second report
        must not kill the replacement.
        """
        async with member.lock:
            if member.incarnation != incarnation or member.benched:
                return
            self.discard(member, why)
            # a member that leaves gets no successor; its tasks are in the queue again
            if member.leaving:
                return
            # counted per place: one bad node must not use up the restarts of the others
            member.restarts += 1
            if member.restarts > self.service.max_restarts:
                self._bench(member, why)
                return
            # a task of its own, so that a member that is removed meanwhile can stop it
            member.refill = asyncio.create_task(self._fill(member))
            try:
                await member.refill
            except RunFailed as failure:
                self._bench(member, str(failure))
            except asyncio.CancelledError:
                if not member.leaving:  # of the refill alone, because the member is being removed
                    raise

    def discard(self, member: Member, why: str) -> None:
        """Kill the actor in this place, and leave the place empty."""
        where = {key: getattr(member.info, key, None) for key in ("pid", "node")}
        self._tell("actor_died", member, why=why, **where)
        member.kill()  # it may only hang, and would go on with what others do again
        # from here on every further report of this loss names an incarnation that is gone
        member.incarnation += 1
        self.lost += 1
        self.changed()

    def _bench(self, member: Member, why: str) -> None:
        member.benched = True
        self.released(self.name(member))
        self.event(
            "actor_benched", kind=self.kind, actor=member.index, restarts=member.restarts, why=why
        )
        self.changed()
        self._end_if_none_is_left(why)

    def _end_if_none_is_left(self, why: str) -> None:
        """An actor that is on its way counts: it may yet serve."""
        if self.alive or self.starting:
            return
        advice = f"raise services.{self.kind}.max_restarts or fix the cause"
        self.fail(
            RunFailed(
                f"no {self.kind} actor is left, last: {why}; {advice}, then continue with --resume"
            )
        )

    def _open(self, member: Member) -> None:
        slots = range(self.service.in_flight)
        member.slots = [asyncio.create_task(self.serve(member)) for _ in slots]

    async def _fill(self, member: Member, joins: bool = False) -> None:
        """Create an actor for this place and wait until it answers. Raises RunFailed."""
        who = f"{self.kind} actor {member.index}"
        handle, info = await start_actor(
            self.transport,
            self.spawn,
            f"{self.name(member)}.{member.incarnation}",
            who,
            self.start_deadline_s,
            lambda why: self.event("actor_waits", kind=self.kind, actor=member.index, why=why),
            lambda: self.gone(self.name(member), None),
        )
        # those that the run starts with are compared by the first use of them all
        if (joins or member.incarnation) and (fault := self.accepts(info)):
            # no member holds it yet, so nothing else would end it
            self.transport.kill(handle)
            raise RunFailed(f"{who} {fault}")
        # kept for the callback: when the node is lost another actor may be in this place
        incarnation, gone = member.incarnation, self.gone(self.name(member), info.node)
        member.fill(handle, info, gone)
        gone.add_done_callback(lambda why: self._node_lost(member, incarnation, why))
        name = (
            "actor_replaced" if member.incarnation else "actor_added" if joins else "actor_started"
        )
        self._tell(name, member, **info.event_fields())
        self.changed()

    def _node_lost(self, member: Member, incarnation: int, why: asyncio.Future[str]) -> None:
        """Replace the actor at once, though it may be idle: the next task must not wait for it."""
        member.alarm.wake()  # those that wait for its answers, whichever actor is here by now
        if not why.cancelled() and member.handle and member.incarnation == incarnation:
            self.stranded(member, incarnation, why.result())

    def _tell(self, name: str, member: Member, **fields: object) -> None:
        self.event(
            name, kind=self.kind, actor=member.index, incarnation=member.incarnation, **fields
        )
