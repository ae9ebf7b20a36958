"""Starting one actor: place it, construct it and wait until it is ready, or say why it failed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TypeAlias, cast

from ray.exceptions import ActorUnschedulableError, OutOfMemoryError, RayActorError, RayError

from actors.calls import Call
from actors.messages import ActorInfo
from cluster.runtime import clock
from cluster.runtime.member import NodeLost
from cluster.runtime.ray_directory import full_here
from cluster.runtime.transport import Handle, Transport
from planning.placement import NoRoom
from records.errors import TRACEBACK_CHARACTERS, RunFailed, error_summary
from records.rundir import Event

Spawn: TypeAlias = Callable[[str], Handle]  # from an actor's name; raises NoRoom
LOST_STARTS = 4
"""Number of times that an actor may die before it is ready. A node that died is still considered
alive for some seconds, so that actors are placed on it.
"""
LOW_MEMORY_STARTS = 7
"""Number of times that Ray may kill it before it is ready because its node is low on memory. The
pauses in between double, up to about a minute in all: by then the memory is often free again.
"""
PAUSE_S = 1.0
LONGEST_PAUSE_S = 16.0
"""Longest pause between two starts while the disk of Ray's logs is full."""
Gone: TypeAlias = Callable[[str, "str | None"], "asyncio.Future[str]"]
"""Maps an actor's name, and its node if the actor has reported it, to a future. When that node, or
the node that was chosen for the actor, is lost, the future gets the reason as its result.
"""
DIED = (RayActorError, OutOfMemoryError)
"""What Ray raises for a call to a dead actor; the second if Ray itself killed the actor because its
node was low on memory.
"""
LOST = (*DIED, ActorUnschedulableError, NodeLost)
"""Errors of an actor that was placed on a node that has died: Ray does so until it has noticed."""
COLOR = re.compile(r"\x1b\[[0-9;]*m")
READY = Call("ready", (), {})


class NotPlaced(RunFailed):
    """There was no room for an actor until its deadline."""


async def start_actor(
    transport: Transport,
    spawn: Spawn,
    name: str,
    who: str,
    deadline_s: float,
    event: Event,
    gone: Callable[[], asyncio.Future[str]],
) -> tuple[Handle, ActorInfo]:
    """Start an actor; return its handle and its description of itself.

    ``event`` is called once with "actor_waits" if the actor has to wait for room on a node or on a
    disk, or for memory, and with "actor_raised" if its constructor raised. ``gone`` is called after
    the actor was placed.

    Raises:
        RunFailed: the constructor raised (with its message), the actor died repeatedly, or it was
            not placed or not ready within ``deadline_s`` seconds. Ray itself would leave an actor
            pending for ever.
    """
    start = _Start(transport, who, deadline_s, event)
    while True:
        failures = start.lost + start.low + start.full
        try:
            # a new name for every attempt: Ray releases a dead actor's name only a while later
            handle = spawn(f"{name}-{failures}" if failures else name)
        except NoRoom as error:
            await start.without_room(error)
            continue
        try:
            # an actor that was placed at the last moment still gets a second to answer
            left = max(start.deadline - clock.now(), PAUSE_S)
            return handle, await _ready(transport, handle, left, gone())
        except asyncio.CancelledError:
            # no member refers to it yet, so nothing else would kill it
            transport.kill(handle)
            raise
        except (TimeoutError, RayError, NodeLost) as error:
            # an actor that becomes ready later would hold its resources for nothing
            transport.kill(handle)
            await start.without_answer(error)


class _Start:
    """Failed attempts to start one actor: each is followed by a pause, or raises RunFailed."""

    def __init__(self, transport: Transport, who: str, deadline_s: float, event: Event):
        self.transport, self.who, self.deadline_s, self.event = transport, who, deadline_s, event
        self.deadline = clock.now() + deadline_s
        self.lost = self.low = self.full = 0
        self._told = False

    async def without_room(self, error: NoRoom) -> None:
        """Handle an attempt for which no node had room."""
        if self._late:
            raise NotPlaced(
                f"{self.who} could not be placed for {self.deadline_s:g} s: {error}"
            ) from None
        await self._wait(str(error), PAUSE_S)

    async def without_answer(self, error: Exception) -> None:
        """Handle an attempt in which the actor was placed but did not become ready."""
        if isinstance(error, TimeoutError):
            raise RunFailed(
                f"{self.who} was not placed or not ready within services.start_deadline_s ="
                f" {self.deadline_s:g} s: other processes may occupy its resources (see `ray"
                " status`), or loading takes longer"
            ) from None
        if isinstance(error, OutOfMemoryError):
            self.low += 1
            if self.low < LOW_MEMORY_STARTS and not self._late:
                return await self._wait(cause(error), PAUSE_S * 2 ** (self.low - 1))
        # a constructor that raised would raise again
        elif isinstance(error, LOST) and not getattr(error, "actor_init_failed", False):
            if isinstance(error, DIED) and (why := full_here()):
                return await self._without_disk(why)
            self.lost += 1
            if self.lost < LOST_STARTS and not self._late:
                return await asyncio.sleep(PAUSE_S)
        if frames := frames_of(error):
            self.event("actor_raised", unit="start", why=cause(error), traceback=frames)
        raise RunFailed(f"{self.who} did not start: {cause(error)}") from None

    async def _without_disk(self, why: str) -> None:
        """Handle an attempt in which the actor died while the disk of Ray's logs is full."""
        if self._late:
            raise RunFailed(f"{self.who} could not be started for {self.deadline_s:g} s: {why}")
        self.full += 1
        await self._wait(why, min(PAUSE_S * 2 ** (self.full - 1), LONGEST_PAUSE_S))

    @property
    def _late(self) -> bool:
        return clock.now() > self.deadline

    async def _wait(self, why: str, pause_s: float) -> None:
        if not self._told:
            self.event("actor_waits", why=why)
        self._told = True
        await asyncio.sleep(pause_s)


async def _ready(
    transport: Transport, handle: Handle, left_s: float, gone: asyncio.Future[str]
) -> ActorInfo:
    """Return the actor's description of itself.

    Raises NodeLost, TimeoutError, or what the constructor raised.
    """
    future = transport.answer(transport.send(handle, READY)[0])
    try:
        # ``gone`` is shared by all actors of the node; ``asyncio.wait`` never cancels it
        await asyncio.wait({future, gone}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if future.done():
            return cast(ActorInfo, future.result())
    finally:
        future.cancel()  # no effect if it is done
    if gone.done():
        raise NodeLost(gone.result())
    raise TimeoutError


def cause(error: BaseException) -> str:
    """Return the informative line of a Ray error: the exception in the actor, without frames."""
    if isinstance(error, OutOfMemoryError):
        return "Ray killed it because its node is low on memory (RAY_memory_usage_threshold)"
    inner = getattr(error, "cause", None)
    if inner is not None:
        return error_summary(inner)
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    raised = [
        line
        for line in lines
        if "Error" in line.split(":")[0] and not line.startswith(('File "', "ray::"))
    ]
    return (raised or lines or [type(error).__name__])[-1][:500]


def frames_of(error: BaseException) -> str | None:
    """Return the traceback in the actor that a Ray error carries.

    None if the actor raised nothing: it died, or an object was lost.
    """
    text = COLOR.sub("", str(error))
    return text[-TRACEBACK_CHARACTERS:] if 'File "' in text else None
