"""Publishing: the learner's packed policy, through the object store, into every explorer, acknowledged.

The chunks are return values of an actor method, so the driver owns them and a dying learner takes nothing along. An explorer
loads before its next unit: when it is new, replaced, or behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.errors import RunFailed
from cluster.pool import ActorPool, Worker


@dataclass(frozen=True)
class Published:
    """One version in the object store."""

    version: int
    manifest: Any
    chunks: list[Any]  # references, in order

    @property
    def nbytes(self) -> int:
        """Bytes of one broadcast to one explorer."""
        return sum(self.manifest.chunk_sizes)


class WeightChannel:
    """Holds the newest version. ``load_into`` is the rollout pool's `prepare`."""

    def __init__(self, event: Callable[..., None]):
        self._event = event
        self.current: Published | None = None

    async def publish(self, version: int, learner: ActorPool, rollout: ActorPool) -> dict[str, float]:
        """Export ``version`` from the learner and load it everywhere; metrics under their contract names."""
        start = time.perf_counter()
        backend = one_backend(rollout)
        manifest, statistics = await learner.call(("export", version), "export", version, *([backend] if backend else []))
        chunks = []
        for index in range(len(manifest.chunk_sizes)):
            _, (ref,) = await learner.call(("chunk", version, index), "chunk_by_reference", index, returns=2)
            chunks.append(ref)
        self.current = Published(version, manifest, chunks)
        await rollout.each(self.load_into_worker(rollout))
        seconds = time.perf_counter() - start
        self._event(
            "version_published", version=version, bytes=self.current.nbytes, seconds=round(seconds, 4), explorers=rollout.alive
        )
        return {"time/publish_s": seconds, "weights/version": version, "weights/bytes": self.current.nbytes, **statistics}

    def load_into_worker(self, rollout: ActorPool) -> Callable[[Worker], Any]:
        """The coroutine function that brings one worker up to date, and does nothing when it is."""

        async def load(worker: Worker) -> None:
            published = self.current
            if published is None or worker.state == (published.version, published.manifest.checksum):
                return
            one_backend(rollout)
            version, checksum = await rollout.ask(worker, "load", published.manifest, *published.chunks)
            if (version, checksum) != (published.version, published.manifest.checksum):
                raise RunFailed(
                    f"rollout actor {worker.index} acknowledged version {version} checksum {checksum}, "
                    f"published was {published.version} {published.manifest.checksum}"
                )
            worker.state = (version, checksum)

        return load


def one_backend(rollout: ActorPool) -> str | None:
    """The precision backend that the explorers say they run; None where they do not say.

    Raises RunFailed when they differ: a kernel of its own rounds in its own way, and results would depend on who computed what.
    """
    hosts = {worker.facts["backend"]: worker.facts.get("host", "?") for worker in rollout.workers if worker.facts.get("backend")}
    if len(hosts) > 1:
        found = ", ".join(f"{backend} on {host}" for backend, host in hosts.items())
        raise RunFailed(
            f"the explorers run different precision backends ({found}), and a run has one: name it in explore.backend, or "
            "keep explorers to one kind of GPU"
        )
    return next(iter(hosts), None)
