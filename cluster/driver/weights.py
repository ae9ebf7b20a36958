"""Publishing: the learner's packed policy, through the object store, into every explorer,
acknowledged.

The chunks are return values of an actor method, so the driver owns them and a dying learner takes
nothing along. An explorer loads the version that its next chunk names, when it has another: when it
is new, replaced, behind, or ahead.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.runtime.pool import ActorPool
from cluster.runtime.worker import Unit, Worker
from records.errors import RunFailed


@dataclass(frozen=True)
class Published:
    """One version in the object store."""

    version: int
    backend: str | None  # precision that it is packed for; None: explorers do not say
    manifest: Any
    chunks: list[Any]  # references, in order

    @property
    def nbytes(self) -> int:
        """Bytes of one broadcast to one explorer."""
        return sum(self.manifest.shard_sizes)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What a worker remembers of the version it holds."""
        return self.version, self.manifest.checksum, self.backend


class WeightChannel:
    """Holds the versions that a chunk may name. ``load_for`` is the rollout pool's `prepare`."""

    def __init__(self, event: Callable[..., None], ahead: int = 0):
        """``ahead``: by how many versions a chunk may be behind the newest. With 0 explorers load a
        version when it is published; else when their first chunk names it, for they may be at work
        with the one before.
        """
        self._event, self._ahead = event, ahead
        self._held: dict[int, Published] = {}
        self.chosen: str | None = (
            None  # the run's precision, from its first publishing on; a checkpoint keeps it
        )
        self.why = ""

    @property
    def current(self) -> Published | None:
        """The newest version."""
        return self._held[max(self._held)] if self._held else None

    def held(self, version: int) -> Published:
        """A version that was published and may still be named. Raises RunFailed for any other."""
        if version not in self._held:
            there = ", ".join(map(str, sorted(self._held))) or "none"
            raise RunFailed(
                f"policy version {version} is asked for, but those held are: {there}; continue with"
                " --resume"
            )
        return self._held[version]

    async def publish(
        self,
        version: int,
        learner: ActorPool,
        rollout: ActorPool,
        backend: str | None = None,
        weights: str | None = None,
    ) -> dict[str, float]:
        """Export ``version`` from the learner and make it the newest; metrics under their contract
        names.

        ``backend``: the precision to pack for; None: the run's, which is what its first explorers
        reported. ``weights``: the adapter to export; None: the sampling policy.
        """
        start = time.perf_counter()
        native = one_backend(rollout)
        backend = backend or self._of_the_run(native, rollout)
        manifest, statistics = await learner.call(
            ("export", version), "export", version, backend, weights
        )
        chunks = []
        for index in range(len(manifest.shard_sizes)):
            _, (ref,) = await learner.call(
                ("chunk", version, index), "chunk_by_reference", index, returns=2
            )
            chunks.append(ref)
        published = Published(version, backend, manifest, chunks)
        self._held = {
            v: p for v, p in self._held.items() if version - self._ahead <= v < version
        } | {version: published}
        if not self._ahead:
            await rollout.each(lambda worker: _load(rollout, worker, published))
        seconds = time.perf_counter() - start
        self._event(
            "version_published",
            version=version,
            backend=backend,
            bytes=published.nbytes,
            seconds=round(seconds, 4),
            explorers=rollout.alive,
        )
        return {
            "time/publish_s": seconds,
            "weights/version": version,
            "weights/bytes": published.nbytes,
            **statistics,
        }

    def _of_the_run(self, own: str | None, rollout: ActorPool) -> str | None:
        """The run's precision: chosen, and said, once; kept where it goes on with explorers whose
        own is another.

        Raises RunFailed when these cannot run it.
        """
        if own is None or own == self.chosen:
            return own
        if self.chosen is None:
            self.chosen, self.why = (
                own,
                next((w.facts["why"] for w in rollout.workers if w.facts.get("why")), ""),
            )
            self._event("backend_chosen", backend=own, why=self.why)
            return own
        runs = common_backends(rollout)
        if self.chosen not in runs:
            raise RunFailed(
                f"this run explores in {self.chosen}, which its explorers here cannot run (they can"
                f" {', '.join(sorted(runs))}): continue it with explorers on the kind of GPU that"
                " it began on"
            )
        if not self.why:
            self.why = f"as the run began; its explorers here would take {own}"
            self._event("backend_kept", backend=self.chosen, why=self.why)
        return self.chosen

    def load_for(self, rollout: ActorPool) -> Callable[[Worker, Unit], Awaitable[None]]:
        """The coroutine function that gives a worker the version its unit names, and does nothing
        when it has it.
        """

        async def prepare(worker: Worker, unit: Unit) -> None:
            await _load(rollout, worker, self.held(unit.args[0].key.version))

        return prepare


async def _load(rollout: ActorPool, worker: Worker, published: Published) -> None:
    if worker.state == published.identity:
        return
    one_backend(rollout)
    if published.backend != (worker.state[2] if worker.state else worker.facts.get("backend")):
        worker.facts["cold"] = (
            True  # its denoiser is made anew, which may take as long as at the start
        )
    version, checksum = await rollout.ask(
        worker, "load", published.backend, published.manifest, *published.chunks
    )
    if (version, checksum) != (published.version, published.manifest.checksum):
        raise RunFailed(
            f"rollout actor {worker.index} acknowledged version {version} checksum {checksum}, "
            f"published was {published.version} {published.manifest.checksum}"
        )
    worker.state = published.identity


def one_backend(rollout: ActorPool) -> str | None:
    """The precision backend that the explorers are configured to run, as they say; None where they
    do not say.

    Raises RunFailed when they differ: a kernel of its own rounds in its own way, and results would
    depend on who computed what.
    """
    hosts = {
        worker.facts["backend"]: worker.facts.get("host", "?")
        for worker in rollout.workers
        if worker.facts.get("backend")
    }
    if len(hosts) > 1:
        found = ", ".join(f"{backend} on {host}" for backend, host in hosts.items())
        raise RunFailed(
            f"the explorers run different precision backends ({found}), and a run has one: name it"
            " in explore.backend, or keep explorers to one kind of GPU"
        )
    return next(iter(hosts), None)


def misfit(rollout: ActorPool, facts: Mapping[str, Any]) -> str | None:
    """Why an explorer that says ``facts`` cannot join the others, or take one's place; None: it
    can.
    """
    own = {
        worker.facts["backend"]
        for worker in rollout.workers
        if worker.handle is not None and worker.facts.get("backend")
    }
    mine = facts.get("backend")
    if mine is None or not own or mine in own:
        return None
    return (
        f"on {facts.get('host', '?')} runs precision backend {mine}, the others"
        f" {', '.join(sorted(own))}: keep explorers to one kind of GPU"
        " (services.rollout.accelerator), or name the backend in explore.backend"
    )


def common_backends(rollout: ActorPool) -> set[str]:
    """The precision backends that every explorer could run, as they say."""
    said = [set(worker.facts["runs"]) for worker in rollout.workers if worker.facts.get("runs")]
    return set.intersection(*said) if said else set()
