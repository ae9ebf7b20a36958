"""Actor processes that outlive a run, so that the next test's run need not start any.

Nearly all of an actor's start is the import of torch, peft and diffusers: seconds of CPU time each,
six times a run. Here the process stays when its run ends, and the next run builds its actor in it
anew, by the product's own constructor. All else is as ever: one process per actor, real messages,
and SIGKILL is SIGKILL. Two limits: an actor that takes a dead one's place always gets a new
process, and a process that does not let go of its actor at once is killed with it.
"""

import asyncio
import gc
import itertools
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import ray
from ray.exceptions import RayError

from actors.messages import ActorInfo
from cluster.driver.services import ActorServices
from cluster.runtime.pool import ActorPool

IDLE: defaultdict[tuple[Any, ...], list[Any]] = defaultdict(list)
"""Processes without a run, by what they can be: service, actor class, threads, share and labels."""
LEAVE_S = 20.0
"""One that hangs is given up after so long."""
EATEN = 256 << 20
NUMBERS = itertools.count()


def host_of(actor: type) -> type:
    """``actor`` as a class whose instances can be built again and again: ``take`` the arguments,
    then ``ready`` as always.
    """

    class Host(actor):
        def __init__(self) -> None:
            pass

        def take(self, *arguments: Any) -> None:
            self.leave()
            self.arguments = arguments

        def ready(self) -> ActorInfo:
            actor.__init__(self, *self.arguments)
            return actor.ready(self)

        def eat(self) -> None:
            """Memory, until there is none."""
            self.eaten = b"x" * EATEN  # written to: the kernel gives pages when they are

        def leave(self) -> None:
            vars(self).clear()
            gc.collect()
            if measured := sys.modules.get("coverage"):  # Ray ends a process without its exit hooks
                measured.Coverage.current().save()

    return Host


async def stop_and_keep(
    pools: Sequence[ActorPool],
    stop: Callable[[], Awaitable[None]],
    idle: Callable[[ActorPool], list[Any]],
) -> None:
    """``stop`` pools without the end of their members' processes, which are then ``idle``. An actor
    that is still being started, in the place of a dead one, has no member yet: it does end.
    """
    kept = [
        (idle(pool), member.handle, member.info.node)
        for pool in pools
        for member in pool.members
        if member.handle is not None and member.info is not None
    ]
    kill = ray.kill

    def spare(handle: Any, **how: Any) -> None:
        if not any(handle is one for _, one, _ in kept):
            kill(handle, **how)

    with mock.patch.object(ray, "kill", spare):
        await stop()

    async def keep(idle: list[Any], handle: Any, node: str) -> None:
        try:
            await asyncio.wait_for(handle.leave.remote(), LEAVE_S)
        except (RayError, TimeoutError):
            ray.kill(handle)
        else:
            idle.append((handle, node))

    await asyncio.gather(*(keep(*each) for each in kept))


class Kept:
    """Processes for actors of one class, for one pool after the other."""

    def __init__(self, actor: type, **options: Any):
        self.remote = ray.remote(host_of(actor)).options(**options)
        self.idle = IDLE[actor, *sorted(options.items())]

    def spawn(self, *arguments: Any) -> Any:
        """An actor in a process that is idle, or in a new one."""
        handle = self.idle.pop()[0] if self.idle else self.remote.remote()
        handle.take.remote(*arguments)
        return handle

    async def stop(self, *pools: ActorPool) -> None:
        """Close the pools' slots, and let the processes be."""

        async def stop() -> None:
            await asyncio.gather(*(pool.stop() for pool in pools))

        await stop_and_keep(pools, stop, lambda pool: self.idle)


class HostedServices(ActorServices):
    """The services of a run in processes that may have served another run before, and stay for the
    next.
    """

    def _spawner(self, kind: str, actor: type, *args: Any) -> Callable[[str], Any]:
        self._actors = {**getattr(self, "_actors", {}), kind: actor}
        start, idle = super()._spawner(kind, host_of(actor)), self._idle(kind)

        def spawn(name: str) -> Any:
            if name.endswith(".0") and idle:
                handle, node = idle.pop()
                # where it is, not where there is most room; its share of that node is its own
                who, placer = name.removesuffix(".0"), self.places._placer
                placer.put([who], [node])
                placer.take(who)
            else:
                handle = start(f"{name}-{next(NUMBERS)}")
            handle.take.remote(*args)
            return handle

        return spawn

    async def stop(self) -> None:
        """Close the slots as ever, but let the processes be."""
        await stop_and_keep(self.pools, super().stop, lambda pool: self._idle(pool.kind))

    def _idle(self, kind: str) -> list[Any]:
        service = self.config.services.of(kind)
        return IDLE[
            kind,
            self._actors[kind],
            service.threads,
            service.cpus,
            tuple(sorted(service.labels.items())),
        ]


def end_idle() -> None:
    """End the processes without a run: what they have of their nodes may be needed."""
    for idle in IDLE.values():
        while idle:
            ray.kill(idle.pop()[0])


@contextmanager
def hosted() -> Iterator[None]:
    """Within the context every run of this process, by a command or not, lives on the Ray that is
    here and on hosts.
    """
    patches = [
        mock.patch(f"cluster.driver.{module}.ActorServices", HostedServices)
        for module in ("session", "offline")
    ]
    patches += [
        mock.patch(f"cluster.driver.{module}.join_or_start_ray", lambda config: False)
        for module in ("train", "offline")
    ]
    patches.append(mock.patch.object(ray, "shutdown"))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
