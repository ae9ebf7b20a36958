"""Bringing one actor to life: placed, constructed, answering; or a plain sentence why not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias, cast

from ray.exceptions import ActorUnschedulableError, OutOfMemoryError, RayActorError, RayError

from actors.calls import Call
from actors.messages import ActorInfo
from cluster.runtime import clock
from cluster.runtime.member import NodeLost
from cluster.runtime.transport import Handle, Transport
from planning.placement import NoRoom
from records.errors import RunFailed, described

Spawn: TypeAlias = Callable[[str], Handle]  # from an actor's name; raises NoRoom
LOST_STARTS = 4
"""Times an actor may vanish before it answers: a node that died is still thought alive for some
seconds.
"""
LOW_MEMORY_STARTS = 7
"""Times that Ray may kill it before it answers because its node is low on memory. Pauses between
them double, so that it is given a minute: what took the memory is often gone by then.
"""
PAUSE_S = 1.0
Gone: TypeAlias = Callable[[str, "str | None"], "asyncio.Future[str]"]
"""Maps an actor's name, and its node where the actor has said which, to a future that is done, with
the reason, when the node that it is on, or that was chosen for it, is lost.
"""
DIED = (RayActorError, OutOfMemoryError)
"""What Ray raises for a call to an actor that is dead; the second where Ray itself killed it
because its node was low on memory.
"""
READY = Call("ready", (), {})


async def start_actor(
    transport: Transport,
    spawn: Spawn,
    name: str,
    who: str,
    deadline_s: float,
    waits: Callable[[str], None],
    gone: Callable[[], asyncio.Future[str]],
) -> tuple[Handle, ActorInfo]:
    """A new actor, and what it says of itself.

    ``waits`` is told once when there is no room for it, or too little memory; ``gone`` is asked
    when it has a place.

    Raises:
        RunFailed: its constructor raised (with the constructor's own words), it died again and
            again, or it was not placed or not ready within ``deadline_s`` seconds. Ray alone would
            keep an actor pending for ever.
    """
    start = _Start(transport, who, deadline_s, waits)
    while True:
        tried = start.lost + start.low
        try:
            # another name for every try: Ray lets go of a dead actor's name a while later
            handle = spawn(f"{name}-{tried}" if tried else name)
        except NoRoom as error:
            await start.without_room(error)
            continue
        try:
            # one that got its place at the last moment is still given a moment to answer
            left = max(start.deadline - clock.now(), PAUSE_S)
            return handle, await _ready(transport, handle, left, gone())
        except asyncio.CancelledError:
            # it has no member yet: nobody else knows of it
            transport.kill(handle)
            raise
        except (TimeoutError, RayError, NodeLost) as error:
            # one that comes to life later would hold its share of the node for nothing
            transport.kill(handle)
            await start.without_answer(error)


class _Start:
    """The failed tries to start one actor: each ends in a pause, or raises RunFailed."""

    def __init__(
        self, transport: Transport, who: str, deadline_s: float, waits: Callable[[str], None]
    ):
        self.transport, self.who, self.deadline_s, self.waits = transport, who, deadline_s, waits
        self.deadline = clock.now() + deadline_s
        self.lost = self.low = 0
        self._told = False

    async def without_room(self, error: NoRoom) -> None:
        """No node had room for it."""
        if self._late:
            raise RunFailed(f"{self.who} had no place for {self.deadline_s:g} s: {error}") from None
        await self._wait(str(error), PAUSE_S)

    async def without_answer(self, error: Exception) -> None:
        """It had a place, and did not answer."""
        if isinstance(error, TimeoutError):
            raise RunFailed(
                f"{self.who} was not placed or not ready within services.start_deadline_s ="
                f" {self.deadline_s:g} s: something else may hold its share of the node (see `ray"
                " status`), or loading takes longer"
            ) from None
        if isinstance(error, OutOfMemoryError):
            self.low += 1
            if self.low < LOW_MEMORY_STARTS and not self._late:
                return await self._wait(cause(error), PAUSE_S * 2 ** (self.low - 1))
        elif isinstance(error, (*DIED, ActorUnschedulableError, NodeLost)):
            # until Ray has noticed that a node died, it still places actors there
            self.lost += 1
            # what its constructor refused once it would refuse again
            raised = getattr(error, "actor_init_failed", False)
            if not raised and self.lost < LOST_STARTS and not self._late:
                return await asyncio.sleep(PAUSE_S)
        raise RunFailed(f"{self.who} did not start: {cause(error)}") from None

    @property
    def _late(self) -> bool:
        return clock.now() > self.deadline

    async def _wait(self, why: str, pause_s: float) -> None:
        if not self._told:
            self.waits(why)
        self._told = True
        await asyncio.sleep(pause_s)


async def _ready(
    transport: Transport, handle: Handle, left_s: float, gone: asyncio.Future[str]
) -> ActorInfo:
    """What the actor says of itself. Raises NodeLost, TimeoutError, or as its constructor."""
    future = transport.answer(transport.send(handle, READY)[0])
    try:
        # ``gone`` belongs to all actors of the node: waited for like this it is never cancelled
        await asyncio.wait({future, gone}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if future.done():
            return cast(ActorInfo, future.result())
    finally:
        future.cancel()  # nothing where it is done
    if gone.done():
        raise NodeLost(gone.result())
    raise TimeoutError


def cause(error: BaseException) -> str:
    """The last informative line of a Ray error: the exception raised in the actor, not the frames
    around it.
    """
    if isinstance(error, OutOfMemoryError):
        return "Ray killed it because its node is low on memory (RAY_memory_usage_threshold)"
    inner = getattr(error, "cause", None)
    if inner is not None:
        return described(inner)
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    raised = [
        line
        for line in lines
        if "Error" in line.split(":")[0] and not line.startswith(('File "', "ray::"))
    ]
    return (raised or lines or [type(error).__name__])[-1][:500]
