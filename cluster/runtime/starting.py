"""Bringing one actor to life: placed, constructed, answering; or a plain sentence why not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias, cast

from ray.exceptions import ActorUnschedulableError, RayActorError, RayError

from actors.calls import Call
from actors.messages import ActorInfo
from cluster.runtime import clock
from cluster.runtime.member import NodeLost
from cluster.runtime.transport import Handle, Transport
from planning.placement import NoRoom
from records.errors import RunFailed

Spawn: TypeAlias = Callable[[str], Handle]  # from an actor's name; raises NoRoom
LOST_STARTS = 4
"""Times an actor may vanish before it answers: a node that died is still thought alive for some
seconds.
"""
PAUSE_S = 1.0
Gone: TypeAlias = Callable[[str, "str | None"], "asyncio.Future[str]"]
"""From an actor's name, and its node where it has said which: done when the node that it is on, or
that was chosen for it, is lost, with the reason.
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

    ``waits`` is told once when there is no room for it; ``gone`` is asked when it has a place.

    Raises:
        RunFailed: its constructor raised (with the constructor's own words), it died again and
            again, or it was not placed or not ready within ``deadline_s`` seconds. Ray alone would
            keep an actor pending for ever.
    """
    deadline = clock.now() + deadline_s
    lost, told = 0, False
    while True:
        try:
            handle = spawn(f"{name}-{lost}" if lost else name)
        except NoRoom as error:
            if clock.now() > deadline:
                raise RunFailed(f"{who} had no place for {deadline_s:g} s: {error}") from None
            if not told:
                waits(str(error))
            told = True
            await asyncio.sleep(PAUSE_S)
            continue
        try:
            left = max(deadline - clock.now(), PAUSE_S)
            return handle, await _ready(transport, handle, left, gone())
        except TimeoutError:
            transport.kill(handle)
            raise RunFailed(
                f"{who} was not placed or not ready within services.start_deadline_s ="
                f" {deadline_s:g} s: something else may hold its share of the node (see `ray"
                " status`), or loading takes longer"
            ) from None
        except asyncio.CancelledError:
            transport.kill(handle)
            raise
        # not at once the end: until Ray has noticed that a node died, it still places actors there
        except (RayActorError, ActorUnschedulableError, NodeLost) as error:
            transport.kill(handle)
            lost += 1
            if (
                getattr(error, "actor_init_failed", False)
                or lost >= LOST_STARTS
                or clock.now() > deadline
            ):
                raise RunFailed(f"{who} did not start: {cause(error)}") from None
            await asyncio.sleep(PAUSE_S)
        except RayError as error:
            raise RunFailed(f"{who} did not start: {cause(error)}") from None


async def _ready(
    transport: Transport, handle: Handle, left_s: float, gone: asyncio.Future[str]
) -> ActorInfo:
    """What the actor says. Raises NodeLost, TimeoutError, or what its constructor raised."""
    future = transport.answer(transport.send(handle, READY)[0])
    try:
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
    inner = getattr(error, "cause", None)
    if inner is not None:
        return f"{type(inner).__name__}: {inner}".strip().splitlines()[0]
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    raised = [
        line
        for line in lines
        if "Error" in line.split(":")[0] and not line.startswith(("File", "ray::"))
    ]
    return (raised or lines or [type(error).__name__])[-1][:500]
