"""An actor with few imports, whose processes start at once, and pools of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from actors.messages import ActorInfo
from actors.runtime import identity

if TYPE_CHECKING:
    from cluster.runtime.pool import ActorPool
    from records.timeline import Span


class Echo:
    """An actor that dies, hangs or raises on request.

    With a ``path`` it writes every task that it computes by ``work`` to that file.
    """

    def __init__(self, path: str = "", broken: bool = False):
        if broken:
            raise ValueError("no such weights: give another path")
        self.path = path

    def ready(self) -> ActorInfo:
        return identity()

    def work(self, unit: int) -> tuple[int, int]:
        time.sleep(0.02)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{unit}\n")
        return unit, os.getpid()

    def double(self, value: int, pause: float = 0.0) -> int:
        time.sleep(pause)
        return 2 * value

    def pair(self, value: int) -> tuple[int, bytes]:
        return value, bytes(200_000)

    def fatal(self, path: str, value: int) -> int:
        """Die in the first call with this `path`."""
        if not os.path.exists(path):
            open(path, "w", encoding="utf-8").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    def note(self, what: str, pause: float = 0.0) -> list[str]:
        time.sleep(pause)
        self.notes = [*getattr(self, "notes", []), what]
        return self.notes

    def poison(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hang_once(self, path: str) -> str:
        if not os.path.exists(path):
            open(path, "w", encoding="utf-8").close()
            os.kill(os.getpid(), signal.SIGSTOP)
        return "woke elsewhere"

    def fail(self) -> None:
        raise KeyError("broken")


class Pool:
    """A pool of Echo actors and the events it wrote.

    Its actors run in processes that the next pool reuses, except those with ``arguments`` that
    break them, or with Ray ``options``.
    """

    def __init__(self, actors: int = 2, path: str = "", **service: Any):
        import ray

        from cluster.runtime.pool import ActorPool
        from configs.services import Service
        from tests.cluster.hosts import Kept

        self.events: list[tuple[str, dict[str, Any]]] = []
        self.spans: list[Span] = []
        self.released: list[str] = []
        self.broken, self.path = False, path
        self.options: dict[str, Any] = {}
        self.kept, self.remote = Kept(Echo, num_cpus=0), ray.remote(Echo)
        self.pool = ActorPool(
            "echo",
            self._spawn,
            Service(actors=actors, **service),
            lambda name, **fields: self.event(name, **fields),
            record=self.spans.append,
            released=self.released.append,
        )

    def _spawn(self, name: str) -> Any:
        if self.broken or self.options:
            return self.remote.options(num_cpus=0, **self.options).remote(self.path, self.broken)
        return self.kept.spawn(self.path)

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def names(self) -> list[str]:
        return [name for name, _ in self.events]

    def run(self, work: Callable[[ActorPool], Coroutine[Any, Any, Any]]) -> Any:
        async def all_of_it() -> Any:
            await self.pool.start()
            try:
                return await asyncio.wait_for(work(self.pool), 90)
            finally:
                await (self.pool.stop() if self.options else self.kept.stop(self.pool))

        return asyncio.run(all_of_it())
