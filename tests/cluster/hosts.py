"""Actor processes that outlive a run, so that the run of the next test need not start any.

Most of an actor's start is the import of torch, peft and diffusers: seconds of CPU time each, six
times per run. Here the process stays when its run ends, and the next run builds its actor in it, by
the product's own constructor. Everything else is unchanged: one process per actor, real messages,
and real SIGKILL. There are two limits: the replacement of a dead actor always gets a new process,
and a process that does not release its actor at once is killed.
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
from cluster.driver.actor_placement import ActorPlacement
from cluster.driver.services import ActorServices
from cluster.runtime.pool import ActorPool

IDLE: defaultdict[tuple[Any, ...], list[Any]] = defaultdict(list)
"""Idle processes by their properties: service, actor class, threads, share and labels."""
LEAVE_S = 20.0
"""Seconds after which a hanging process is given up."""
EATEN = 256 << 20
NUMBERS = itertools.count()


def host_of(actor: type) -> type:
    """Return ``actor`` as a class whose instances can be rebuilt: ``take`` the arguments, then
    ``ready``.
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
            """Allocate memory until none is left."""
            self.eaten = b"x" * EATEN  # written to, because the kernel provides pages only then

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
    """Run ``stop`` of pools without ending their members' processes, which become ``idle``.

    The replacement of a dead actor that is still starting is no member yet, so it does end.
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
    """Processes for actors of one class, used by one pool after another."""

    def __init__(self, actor: type, **options: Any):
        self.remote = ray.remote(host_of(actor)).options(**options)
        self.idle = IDLE[actor, *sorted(options.items())]

    def spawn(self, *arguments: Any) -> Any:
        """Return an actor in an idle process, or in a new one."""
        handle = self.idle.pop()[0] if self.idle else self.remote.remote()
        handle.take.remote(*arguments)
        return handle

    async def stop(self, *pools: ActorPool) -> None:
        """Close the slots of the pools, and keep the processes."""

        async def stop() -> None:
            await asyncio.gather(*(pool.stop() for pool in pools))

        await stop_and_keep(pools, stop, lambda pool: self.idle)


REUSED = "reused/"
"""Prefix of the names of actors whose processes, which have other names, hold their GPUs."""


class HostedPlaces(ActorPlacement):
    """Placement of actors of which some have processes already."""

    def take_again(self, actor: str, node: str) -> None:
        """Place an actor on the node where it runs, not where most room is.

        Its share of that node is its own.
        """
        self._placer.put([actor], [node])
        self._placer.take(actor)
        self._names[actor] = REUSED + actor

    def _holds_gpu(self, actor: str) -> bool:
        name = self._names[actor]
        if name.startswith(REUSED):
            return name not in self._served or actor in self._running
        return super()._holds_gpu(actor)


class HostedServices(ActorServices):
    """Services of a run in processes that may have served another run, and that stay for the
    next.
    """

    def _places(self) -> ActorPlacement:
        return HostedPlaces(self.config, self._event)

    def _spawner(self, kind: str, actor: type, *args: Any) -> Callable[[str], Any]:
        self._actors = {**getattr(self, "_actors", {}), kind: actor}
        start, idle = super()._spawner(kind, host_of(actor)), self._idle(kind)

        def spawn(name: str) -> Any:
            if name.endswith(".0") and idle:
                handle, node = idle.pop()
                places = self.places
                assert isinstance(places, HostedPlaces)
                places.take_again(name.removesuffix(".0"), node)
            else:
                handle = start(f"{name}-{next(NUMBERS)}")
            handle.take.remote(*args)
            return handle

        return spawn

    async def stop(self) -> None:
        """Close the slots as usual, but keep the processes."""
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
    """End the idle processes, because other actors may need their resources."""
    for idle in IDLE.values():
        while idle:
            ray.kill(idle.pop()[0])


@contextmanager
def hosted() -> Iterator[None]:
    """Within the context every run of this process uses the running Ray and reused processes.

    That includes runs of commands.
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
