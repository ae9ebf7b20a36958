"""Publishing: the learner's packed policy, through the object store, into every rollout actor.

Shards are return values of an actor method, so the driver owns them and a dying learner takes none
along. A rollout actor loads the version that its next chunk names, when it has another: when it is
new, replaced, behind, or ahead. It is sent the shards that differ from those it has.
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
from cluster.driver.identity import Expected, PolicyIdentity
from cluster.driver.turns import AllStay
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
    backend: str | None  # precision that it is packed for; None: rollout actors do not say
    shards: list[ObjectRef[Shard]]  # in order
    probe: Expected | None = None  # what the learner makes of it, where it is checked

    @cached_property
    def id(self) -> WeightsId:
        """What an actor that has loaded it acknowledges."""
        return WeightsId(self.manifest.version, self.manifest.checksum, self.backend)


class WeightChannel:
    """Holds the versions that a chunk may name."""

    def __init__(self, event: Event, ahead: int = 0, turns: AllStay | None = None):
        """``ahead``: by how many versions a chunk may be behind the newest. With 0 actors load a
        version when it is published; else when their first chunk names it, for they may be at work
        with the one before. ``turns``: on GPUs that they may share with the learner.
        """
        self._turns = turns or AllStay()
        self._event, self._ahead = event, ahead
        self._own: str | None = None  # what rollout actors would take, at the last publishing
        self._held: dict[int, Published] = {}
        # of versions that actors may have in place, held or not
        self._manifests: dict[WeightsId, Manifest] = {}
        # which shards differ, from one such version to another
        self._changes: dict[tuple[WeightsId | None, WeightsId], list[int]] = {}
        # the run's precision, from its first publishing on; a checkpoint keeps it
        self.chosen: str | None = None
        self.why = ""
        self.identity: PolicyIdentity | None = None  # checks what actors make of what they loaded

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
        learner: LearnerClient,
        rollout: ActorPool,
        backend: str | None = None,
        weights: str | None = None,
    ) -> dict[str, float]:
        """Export ``version`` from the learner and make it the newest; metrics under their contract
        names.

        ``backend``: the precision to pack for; None: the run's, which is what its first rollout
        actors reported. ``weights``: the adapter to export; None: the policy that is sampled.
        """
        start = clock.now()
        own = self._own = one_backend(rollout)
        backend = backend or self._of_the_run(own, rollout)
        exported = await learner.export(version, backend, weights)
        shards, fetched = await self._fetch(version, learner, exported.manifest)
        # now: the learner can be asked about the version that it packed last, and no other
        probe = await self.identity.expected(version, learner) if self.identity else None
        published = Published(exported.manifest, backend, shards, probe)
        # versions from ``version`` on are of a run that has gone back to a checkpoint since
        kept = {v: p for v, p in self._held.items() if version - self._ahead <= v < version}
        self._held = kept | {version: published}
        self._remember(published, rollout)
        # exploring ahead, actors are still busy with the version before, and load with their chunks
        if not self._ahead:
            async with self._turns.of("rollout"):
                await rollout.each(lambda member: self._load(rollout, member, published))
        # with the loading, where nobody explores meanwhile; else it is part of the next exploration
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
        """The version's shards, and the bytes of those that the version before has not. They come
        one by one: the learner then holds one copy of one shard beside its export.

        Only the version right before is looked at: after a return to a checkpoint others may have
        gone with the learner's node.
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
        wanted = {version.id for version in self._held.values()}
        # an actor that has not explored for long still has an old version, and is sent the
        # difference
        wanted |= {member.weights for member in rollout.members if member.weights}
        self._manifests = {one: self._manifests[one] for one in wanted & self._manifests.keys()}

    def _of_the_run(self, own: str | None, rollout: ActorPool) -> str | None:
        """The run's precision, chosen and told once. It is kept where the run goes on with actors
        that would take another: all versions must be ranked by the same arithmetic.

        Raises RunFailed when these cannot run it.
        """
        if own is None or own == self.chosen:
            return own
        if self.chosen is None:
            self.chosen, self.why = own, next((info.why for info in _told(rollout) if info.why), "")
            self._event("backend_chosen", backend=own, why=self.why)
            return own
        runs = common_backends(rollout)
        if self.chosen not in runs:
            raise RunFailed(
                f"this run explores in {self.chosen}, which its rollout actors here cannot run"
                f" (they can {', '.join(sorted(runs))}): continue it with rollout actors on the"
                " kind of GPU that it began on"
            )
        if not self.why:
            self.why = f"as the run began; its rollout actors here would take {own}"
            self._event("backend_kept", backend=self.chosen, why=self.why)
        return self.chosen

    def prepare_for(self, rollout: ActorPool) -> Callable[[Member, object], Awaitable[None]]:
        """What gives a member the version that its next chunk names, unless it has it."""

        def prepare(member: Member, key: object) -> Awaitable[None]:
            assert isinstance(key, ChunkKey), key
            return self._load(rollout, member, self.held(key.version))

        return prepare

    def _changed(self, before: WeightsId | None, published: Published) -> list[int]:
        """The shards that one is sent who has ``before``: worked out once for all of a thousand."""
        way = before, published.id
        if way not in self._changes:
            here = self._manifests.get(before) if before else None
            self._changes[way] = published.manifest.changed_since(here)
        return self._changes[way]

    async def _load(self, rollout: ActorPool, member: Member, published: Published) -> None:
        await self._turns.arrive(member)
        if member.weights == published.id:
            return
        own, before = member.info.backend if member.info else None, member.weights
        # before it gets anything: from an actor of another kind images would come that round
        # otherwise, and nothing would fail. Not for each of a thousand alike: that looks at all
        if own != self._own:
            one_backend(rollout)
        if published.backend != (before.backend if before else own):
            # its denoiser is built again, which may take as long as at the start
            member.cold, before = True, None
        sent = self._changed(before, published)
        shards = (resolved(published.shards[index]) for index in sent)
        member.weights = None  # until it says that it has them
        loaded = await rollout.ask(
            member, RolloutActor.load, published.backend, published.manifest, sent, *shards
        )
        # the bytes were checked on arrival; this is about which version it believes to hold
        if loaded != published.id:
            raise RunFailed(
                f"rollout actor {member.index} acknowledged version {loaded.version} checksum"
                f" {loaded.checksum}, published was {published.id.version} {published.id.checksum}"
            )
        if self.identity and published.probe:
            await self.identity.check(rollout, member, published.probe)
        member.weights = published.id


def _told(rollout: ActorPool) -> list[ActorInfo]:
    """What actors say of themselves; in a place that is being filled, what the last one said."""
    return [member.info for member in rollout.members if member.info is not None]


def one_backend(rollout: ActorPool) -> str | None:
    """The precision that rollout actors are configured to explore in; None where they do not say.

    Raises RunFailed when they differ: every kernel rounds in its own way, and results would depend
    on which actor computed what.
    """
    hosts = {info.backend: info.host for info in _told(rollout) if info.backend}
    if len(hosts) > 1:
        found = ", ".join(f"{backend} on {host}" for backend, host in hosts.items())
        raise RunFailed(
            f"the rollout actors run different precision backends ({found}), and a run has one:"
            " name it in explore.backend, or keep rollout actors to one kind of GPU"
        )
    return next(iter(hosts), None)


def incompatibility(rollout: ActorPool, info: ActorInfo) -> str | None:
    """Why an actor that says ``info`` cannot join the others, or replace one; None: it can."""
    if info.backend is None:
        return None
    others: set[str] = set()
    for member in rollout.members:
        other = member.info.backend if member.info and member.handle is not None else None
        # one that is alike will do: of a thousand that join not each looks at all others
        if other == info.backend:
            return None
        if other is not None:
            others.add(other)
    if not others:
        return None
    return (
        f"on {info.host} runs precision backend {info.backend}, the others"
        f" {', '.join(sorted(others))}: keep rollout actors to one kind of GPU"
        " (services.rollout.accelerator), or name the backend in explore.backend"
    )


def common_backends(rollout: ActorPool) -> set[str]:
    """The precisions that every rollout actor could explore in, as they say."""
    runs = [set(info.runs) for info in _told(rollout) if info.runs]
    return set[str].intersection(*runs) if runs else set()
