"""Publish the learner's packed policy through the object store to every rollout actor.

Shards are return values of an actor method, so the driver owns them and none is lost with the
learner. A rollout actor loads the version that its next chunk names if it has another one, because
it is new, replaced, behind or ahead. It is sent only the shards that differ from its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property

from ray import ObjectRef

from actors.calls import resolved
from actors.clients import LearnerClient
from actors.messages import ActorInfo, ChunkKey, Shard, WeightsId
from actors.rollout import RolloutActor
from cluster.driver.gpu_turns import NoGpuTurns
from cluster.driver.identity import PolicyIdentity, ProbeReference
from cluster.runtime import clock
from cluster.runtime.member import Member
from cluster.runtime.pool import ActorPool
from policy.precision.manifest import Manifest
from records.errors import RunFailed
from records.rundir import Event


@dataclass(frozen=True)
class Published:
    """One version in the object store."""

    manifest: Manifest
    backend: str | None  # precision that it is packed for; None: rollout actors report none
    shards: list[ObjectRef[Shard]]  # in order
    probe: ProbeReference | None = None  # the learner's result, if the version is checked

    @cached_property
    def id(self) -> WeightsId:
        """The id with which an actor acknowledges that it has loaded the version."""
        return WeightsId(self.manifest.version, self.manifest.checksum, self.backend)


class WeightChannel:
    """Publishes policy versions, and holds those that a chunk may name."""

    def __init__(self, event: Event, ahead: int = 0, turns: NoGpuTurns | None = None):
        """``ahead``: by how many versions a chunk may be behind the newest.

        With 0, actors load a version when it is published; otherwise when a chunk first names it,
        because they may still be working with the version before. ``turns``: their turns on GPUs
        that they share with the learner.
        """
        self._turns = turns or NoGpuTurns()
        self._event, self._ahead = event, ahead
        # precision that rollout actors reported, as of the last publishing
        self._reported_backend: str | None = None
        self._held: dict[int, Published] = {}
        # of versions that actors may have loaded, held or not
        self._manifests: dict[WeightsId, Manifest] = {}
        # indices of shards that differ between two such versions
        self._changes: dict[tuple[WeightsId | None, WeightsId], list[int]] = {}
        # the run's precision, set at its first publishing; stored in checkpoints
        self.chosen: str | None = None
        self.why = ""
        # checks the results of actors that loaded a version
        self.identity: PolicyIdentity | None = None

    @property
    def current(self) -> Published | None:
        """The newest version."""
        return self._held[max(self._held)] if self._held else None

    def held(self, version: int) -> Published:
        """Return a version that chunks may still name. Raises RunFailed for any other."""
        if version not in self._held:
            known = ", ".join(map(str, sorted(self._held))) or "none"
            raise RunFailed(
                f"policy version {version} is not available; available: {known}; continue with"
                " --resume"
            )
        return self._held[version]

    async def publish(
        self,
        version: int,
        learner: LearnerClient,
        rollout: ActorPool,
        backend: str | None = None,
        weights: str | None = None,
    ) -> dict[str, float]:
        """Export ``version`` from the learner and make it the newest; return metrics.

        ``backend``: the precision to pack for; None: the run's, which its first rollout actors
        reported. ``weights``: the adapter to export; None: the sampling policy.
        """
        start = clock.now()
        own = self._reported_backend = one_backend(rollout)
        backend = backend or self._run_backend(own, rollout)
        exported = await learner.export(version, backend, weights)
        shards, fetched = await self._fetch(version, learner, exported.manifest)
        # now: the learner can answer only for the version that it packed last
        probe = await self.identity.expected(version, learner) if self.identity else None
        published = Published(exported.manifest, backend, shards, probe)
        # versions from ``version`` on date from before a return to a checkpoint
        kept = {v: p for v, p in self._held.items() if version - self._ahead <= v < version}
        self._held = kept | {version: published}
        self._remember(published, rollout)
        # when exploring ahead, actors are still busy with the version before, and load this one
        # with their first chunk of it
        if not self._ahead:
            async with self._turns.hold("rollout"):
                await rollout.each(lambda member: self._load(rollout, member, published))
        # includes loading, unless it happens later, as part of the next exploration
        seconds = clock.now() - start
        self._event(
            "version_published",
            version=version,
            backend=backend,
            bytes=exported.manifest.nbytes,
            fetched=fetched,
            seconds=round(seconds, 4),
            explorers=rollout.alive,
        )
        return {
            "time/publish_s": seconds,
            "weights/version": version,
            "weights/bytes": exported.manifest.nbytes,
            **exported.statistics,
            **(self.identity.take_metrics() if self.identity else {}),
        }

    async def _fetch(
        self, version: int, learner: LearnerClient, manifest: Manifest
    ) -> tuple[list[ObjectRef[Shard]], int]:
        """Return the version's shards, and the bytes of those that were fetched.

        Shards that equal those of the version before are not fetched. The others are fetched one by
        one, so that the learner holds a copy of only one shard beside its export. Only the version
        right before is considered: after a return to a checkpoint others may have been lost with
        the learner's node.
        """
        before = self._held.get(version - 1)
        new = manifest.changed_since(before.manifest if before else None)
        old = {} if before is None else dict(enumerate(before.shards))
        kept = {index: old[index] for index in old.keys() - set(new)}
        shards = [
            kept[index] if index in kept else await learner.shard(version, index)
            for index in range(len(manifest.hashes))
        ]
        return shards, sum(manifest.shard_sizes[index] for index in new)

    def _remember(self, published: Published, rollout: ActorPool) -> None:
        self._manifests[published.id] = published.manifest
        self._changes.clear()
        requested = {version.id for version in self._held.values()}
        # an actor that has not explored for long still has an old version, and will be sent the
        # difference
        requested |= {member.weights for member in rollout.members if member.weights}
        self._manifests = {
            version_id: self._manifests[version_id]
            for version_id in requested & self._manifests.keys()
        }

    def _run_backend(self, own: str | None, rollout: ActorPool) -> str | None:
        """Return the run's precision, which is chosen and reported once.

        It is kept if the run continues with actors that report another one, because all versions
        must be ranked by the same arithmetic. Raises RunFailed if these actors cannot run it.
        """
        if own is None or own == self.chosen:
            return own
        if self.chosen is None:
            self.chosen, self.why = own, next((i.why for i in _actor_infos(rollout) if i.why), "")
            self._event("backend_chosen", backend=own, why=self.why)
            return own
        runs = common_backends(rollout)
        if self.chosen not in runs:
            raise RunFailed(
                f"this run explores in {self.chosen}, which its rollout actors here cannot run"
                f" (they support {', '.join(sorted(runs))}): continue it with rollout actors on the"
                " kind of GPU that it started on"
            )
        if not self.why:
            self.why = f"as the run began; its rollout actors here would take {own}"
            self._event("backend_kept", backend=self.chosen, why=self.why)
        return self.chosen

    def prepare_for(self, rollout: ActorPool) -> Callable[[Member, object], Awaitable[None]]:
        """Return the pool's ``prepare`` hook, which loads the version that the next chunk names."""

        def prepare(member: Member, key: object) -> Awaitable[None]:
            assert isinstance(key, ChunkKey), key
            return self._load(rollout, member, self.held(key.version))

        return prepare

    def _changed_shards(self, before: WeightsId | None, published: Published) -> list[int]:
        """Return the indices of shards to send to an actor that has version ``before``.

        Cached, because a thousand actors may have the same version.
        """
        versions = before, published.id
        if versions not in self._changes:
            manifest = self._manifests.get(before) if before else None
            self._changes[versions] = published.manifest.changed_since(manifest)
        return self._changes[versions]

    async def _load(self, rollout: ActorPool, member: Member, published: Published) -> None:
        await self._turns.ensure_on_gpu(member)
        if member.weights == published.id:
            return
        own, before = member.info.backend if member.info else None, member.weights
        # before anything is sent: images of an actor with another backend would be rounded
        # differently, and nothing would fail. Skipped for actors with the known backend, as
        # ``one_backend`` examines all of them, and there may be a thousand
        if own != self._reported_backend:
            one_backend(rollout)
        if published.backend != (before.backend if before else own):
            # its denoiser is rebuilt, which may take as long as at the start
            member.cold, before = True, None
        changed = self._changed_shards(before, published)
        shards = (resolved(published.shards[index]) for index in changed)
        member.weights = None  # until the actor acknowledges the new ones
        loaded = await rollout.ask(
            member, RolloutActor.load, published.backend, published.manifest, changed, *shards
        )
        # the bytes were checked on arrival; this checks which version the actor believes to hold
        if loaded != published.id:
            raise RunFailed(
                f"rollout actor {member.index} acknowledged version {loaded.version} checksum"
                f" {loaded.checksum}, published was {published.id.version} {published.id.checksum}"
            )
        if self.identity and published.probe:
            await self.identity.check(rollout, member, published.probe)
        member.weights = published.id


def _actor_infos(rollout: ActorPool) -> list[ActorInfo]:
    """Return the info of each member's actor; while it is being replaced, that of the last one."""
    return [member.info for member in rollout.members if member.info is not None]


def one_backend(rollout: ActorPool) -> str | None:
    """Return the precision that rollout actors report to explore in, or None if they report none.

    Raises RunFailed if they differ: every kernel rounds in its own way, and results would depend on
    which actor computed what.
    """
    hosts = {info.backend: info.host for info in _actor_infos(rollout) if info.backend}
    if len(hosts) > 1:
        backends = ", ".join(f"{backend} on {host}" for backend, host in hosts.items())
        raise RunFailed(
            f"the rollout actors run different precision backends ({backends}), but a run must"
            " have one: set explore.backend, or keep rollout actors on one kind of GPU"
        )
    return next(iter(hosts), None)


def incompatibility(rollout: ActorPool, info: ActorInfo) -> str | None:
    """Return why an actor with ``info`` cannot join the others or replace one; None if it can."""
    if info.backend is None:
        return None
    others: set[str] = set()
    for member in rollout.members:
        other = member.info.backend if member.info and member.handle is not None else None
        # one equal actor suffices, so that of a thousand that join not each examines all others
        if other == info.backend:
            return None
        if other is not None:
            others.add(other)
    if not others:
        return None
    return (
        f"on {info.host} runs precision backend {info.backend}, the others"
        f" {', '.join(sorted(others))}: keep rollout actors on one kind of GPU"
        " (services.rollout.accelerator), or set explore.backend"
    )


def common_backends(rollout: ActorPool) -> set[str]:
    """Return the precisions that every rollout actor reports to be able to explore in."""
    runs = [set(info.runs) for info in _actor_infos(rollout) if info.runs]
    return set[str].intersection(*runs) if runs else set()
