"""The supervisor of a pool: starts, replaces, benches, adds and removes the actors of its members.

Ray's own ``max_restarts`` is not used: an actor that Ray restarts keeps its handle but has lost its
weights, and Ray never restarts an actor that hangs. One mechanism that handles both is also easier
to test than two.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial

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
    """Supervisor of all members of one service."""

    kind: str
    transport: Transport
    spawn: Spawn
    service: Service
    event: Event
    start_deadline_s: float
    serve: Callable[[Member], Coroutine[None, None, None]]  # what each ``in_flight`` slot runs
    on_change: Callable[[], None]  # called after an actor was added, replaced or removed
    on_failure: Callable[[RunFailed], None]  # called when no actor is left
    on_release: Callable[[str], None]  # called with the name of an actor that leaves for good
    accepts: Callable[[ActorInfo], str | None]  # why an actor does not match the others, or None
    gone: Gone
    on_node_lost: Callable[[Member, int, str], None]  # called when an incarnation's node is lost
    members: list[Member] = field(init=False)  # by rising index
    starting: int = field(default=0, init=False)  # additional actors that are being started
    lost: int = field(default=0, init=False)  # actors that died or hung since the pool exists

    def __post_init__(self) -> None:
        self.members = [Member(index, self.transport) for index in range(self.service.count)]
        # an index is never reused: it identifies an actor in events, the timeline and Ray's names
        self._next_index = len(self.members)
        self._removed_busy_s = 0.0

    async def start(self) -> None:
        """Create every actor, wait until all answer, and open their slots."""
        # if one fails to start, ``run_together`` cancels the others: none starts after ``stop``
        await run_together(*(self._fill(member) for member in self.members))
        for member in self.members:
            self._open(member)

    async def stop(self) -> None:
        """Close the slots and kill the actors."""
        # slots first: a running slot would take the kill for a loss and replace the actor
        await cancel_all([slot for member in self.members for slot in member.slots])
        self.kill()

    def kill(self) -> None:
        """Kill all actors; a kill that fails does not prevent the others."""
        with contextlib.ExitStack() as kills:
            for member in reversed(self.members):  # an exit stack calls the last callback first
                kills.callback(member.kill)

    @property
    def alive(self) -> int:
        """Number of members that are in service."""
        return sum(member.serving for member in self.members)

    @property
    def busy_s(self) -> float:
        """Seconds during which actors had tasks, summed over present and removed members."""
        return self._removed_busy_s + sum(member.busy_s for member in self.members)

    def name(self, member: Member) -> str:
        """Return the name of the member's actor, for example ``rollout-1``."""
        return f"{self.kind}-{member.index}"

    # ---- size

    def next_actors(self, count: int) -> list[str]:
        """Return the names that the next ``count`` additional actors will get."""
        return [f"{self.kind}-{self._next_index + i}" for i in range(count)]

    async def resize(self, size: int) -> None:
        """Grow or shrink to ``size`` members in service without losing a task.

        Calls must not overlap. Raises RunFailed if a new actor does not start; new actors that did
        start remain.
        """
        if size > self.alive:
            await self._grow(size - self.alive)
        else:
            leaving = [member for member in self.members if member.serving][size:]
            await asyncio.gather(*(self._remove(member) for member in leaving))

    async def _grow(self, count: int) -> None:
        members = [Member(self._next_index + i, self.transport) for i in range(count)]
        # before the first await: ``next_actors`` must not return these names again
        self._next_index += count
        self.starting = count

        async def join(member: Member) -> None:
            try:
                await self._fill(member, joins=True)
            except BaseException:
                # otherwise the node would stay reserved for an actor that does not exist
                self.on_release(self.name(member))
                raise
            finally:
                self.starting -= 1
            # only now: calls to all members must not include one whose actor cannot answer yet
            self.members.append(member)
            self._open(member)

        # wait for all even if one fails: an actor that starts later would have no slots
        outcomes = await asyncio.gather(*map(join, members), return_exceptions=True)
        self.members.sort(key=lambda member: member.index)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                # the last serving member may have been benched while this one was starting
                self._end_if_none_is_left(str(outcome))
                raise outcome

    async def _remove(self, member: Member) -> None:
        member.leaving = True
        for slot in member.idle_slots:
            slot.cancel()  # an idle slot holds no task; busy slots finish theirs
        if member.refill is not None:
            # ``replace`` awaits it while it holds the lock that is needed below
            member.refill.cancel()
        await asyncio.gather(*member.slots, return_exceptions=True)
        async with member.lock:
            # with the lock, as a concurrent replacement would set a new handle after the kill
            member.kill()
        self.members.remove(member)
        # keep its busy time: otherwise a pool that shrinks would seem to have been idle
        self._removed_busy_s += member.busy_s
        self.on_release(self.name(member))
        self._record("actor_removed", member, units=member.answered)
        self.on_change()

    # ---- replacement

    async def renew(self, why: str) -> None:
        """Replace the actors of all members at once. Raises RunFailed if one does not start."""

        async def one(member: Member) -> None:
            async with member.lock:
                if member.handle is not None:
                    self.discard(member, why)
                await self._fill(member)

        # not counted as restarts: the session limits how often it returns to a checkpoint
        await run_together(*map(one, self.members))

    async def replace(self, member: Member, incarnation: int, why: str) -> None:
        """Kill the lost actor and start another one for the same member.

        Has an effect once per incarnation: every task that the actor held reports the loss, and the
        second report must not kill the replacement. A member is benched if its actor was restarted
        ``max_restarts`` times or does not start.
        """
        async with member.lock:
            if member.incarnation != incarnation or member.benched:
                return
            self.discard(member, why)
            # a member that is being removed gets no new actor; its tasks are back in the queue
            if member.leaving:
                return
            # counted per member: one bad node must not use up the restarts of the others
            member.restarts += 1
            if member.restarts > self.service.max_restarts:
                self._bench(member, why)
                return
            # a separate asyncio task, so that ``_remove`` can cancel it
            member.refill = asyncio.create_task(self._fill(member))
            try:
                await member.refill
            except RunFailed as failure:
                self._bench(member, str(failure))
            except asyncio.CancelledError:
                # if the member is leaving, ``_remove`` cancelled only the refill
                if not member.leaving:
                    raise

    def discard(self, member: Member, why: str) -> None:
        """Kill the member's actor without starting another one."""
        where = {key: getattr(member.info, key, None) for key in ("pid", "node")}
        self._record("actor_died", member, why=why, **where)
        # it may be hung rather than dead, and would continue with tasks that are retried elsewhere
        member.kill()
        # further reports of this loss name the old incarnation and are ignored
        member.incarnation += 1
        self.lost += 1
        self.on_change()

    def _bench(self, member: Member, why: str) -> None:
        member.benched = True
        self.on_release(self.name(member))
        self.event(
            "actor_benched", kind=self.kind, actor=member.index, restarts=member.restarts, why=why
        )
        self.on_change()
        self._end_if_none_is_left(why)

    def _end_if_none_is_left(self, why: str) -> None:
        """Fail the pool if no actor is in service or being started."""
        if self.alive or self.starting:
            return
        advice = f"raise services.{self.kind}.max_restarts or fix the cause"
        self.on_failure(
            RunFailed(
                f"no {self.kind} actor is left, last: {why}; {advice}, then continue with --resume"
            )
        )

    def _open(self, member: Member) -> None:
        """Start the member's slots, which pull tasks from the queue."""
        slots = range(self.service.in_flight)
        member.slots = [asyncio.create_task(self.serve(member)) for _ in slots]

    async def _fill(self, member: Member, joins: bool = False) -> None:
        """Create an actor for this member and wait until it answers.

        ``joins`` is True if the pool is growing. Raises RunFailed if the actor does not start or
        does not match the others.
        """
        who = f"{self.kind} actor {member.index}"
        handle, info = await start_actor(
            self.transport,
            self.spawn,
            f"{self.name(member)}.{member.incarnation}",
            who,
            self.start_deadline_s,
            partial(self.event, kind=self.kind, actor=member.index),
            lambda: self.gone(self.name(member), None),
        )
        # the first actors of a run are compared with each other when the run first uses them
        if (joins or member.incarnation) and (fault := self.accepts(info)):
            # no member refers to this actor yet, so nothing else would kill it
            self.transport.kill(handle)
            raise RunFailed(f"{who} {fault}")
        # bound for the callback: when the node is lost, the member may have another actor
        incarnation, gone = member.incarnation, self.gone(self.name(member), info.node)
        member.fill(handle, info, gone)
        gone.add_done_callback(lambda why: self._node_lost(member, incarnation, why))
        name = (
            "actor_replaced" if member.incarnation else "actor_added" if joins else "actor_started"
        )
        self._record(name, member, **info.event_fields())
        self.on_change()

    def _node_lost(self, member: Member, incarnation: int, why: asyncio.Future[str]) -> None:
        """Replace the actor immediately, even if idle, so that the next task need not wait."""
        member.alarm.wake()  # all waiters for answers of this member
        if not why.cancelled() and member.handle and member.incarnation == incarnation:
            self.on_node_lost(member, incarnation, why.result())

    def ended(self) -> list[Member]:
        """Return the members whose actors ended while they were idle."""
        return [
            member
            for member in self.members
            if member.handle is not None
            and not member.busy
            and not member.lock.locked()
            and self.transport.ended(member.handle)
        ]

    def _record(self, name: str, member: Member, **fields: object) -> None:
        """Record an event about the member's present actor."""
        self.event(
            name, kind=self.kind, actor=member.index, incarnation=member.incarnation, **fields
        )
