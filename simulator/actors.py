"""Actors that take time and answer with messages of the right shape, without tensors.

A method here has the name, the arguments and the kind of answer of the actor's that it stands for;
a value that would travel by reference is a ``Token``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence, Sized
from dataclasses import dataclass

import numpy as np
from ray import ObjectRef

from actors.messages import (
    ActorInfo,
    AllRewards,
    ExploreChunk,
    Exported,
    Floats,
    GenerateRequest,
    Images,
    Metadata,
    Moved,
    Probe,
    ProbeResult,
    Rendezvous,
    Scores,
    UpdateRequest,
    WeightsId,
)
from actors.selector import SelectorActor
from configs.section import Tree
from learner.dealing import Dealing
from planning.durations import Durations
from policy.precision.manifest import Manifest
from policy.sampling.noise import stream_seed


@dataclass(frozen=True)
class Token:
    """Stands for what an actor would have made."""


TOKEN = Token()
ONE_STEP = Dealing()
SAME = ProbeResult(np.zeros((1, 1), np.float32), "simulated")


@dataclass(frozen=True)
class Took:
    """An answer, and the seconds of work that it takes when the actor is alone. ``wanted``: cores,
    where they are not those of its actor's other calls.

    ``steps``: the seconds of parts after each of which all replicas wait for each other, and then
    take ``together`` seconds.
    """

    seconds: float
    value: object
    steps: Sequence[float] = ()
    together: float = 0.0
    wanted: float | None = None


class Simulated:
    """What all kinds have in common."""

    def __init__(self, durations: Durations, index: int, replicas: int, backend: str | None):
        self.durations, self.index = durations, index
        self.replicas, self.backend = replicas, backend

    def ready(self) -> Took:
        """See ``actors``."""
        return Took(0.0, ActorInfo(0, "simulated", backend=self.backend))


class TakesTurns(Simulated):
    """What may leave a GPU between its turns."""

    service = ""

    def begin_turn(self) -> Took:
        """Back on the GPU."""
        return self._moves()

    def end_turn(self) -> Took:
        """Into host memory."""
        return self._moves()

    def _moves(self) -> Took:
        seconds = self.durations.move.get(self.service, 0.0)
        return Took(seconds, Moved(0, seconds))


class Encoder(Simulated):
    """Stands for ``EncoderActor``."""

    def encode(self, groups: list[list[str]], images: list[list[Images]] | None = None) -> Took:
        """A token per group."""
        seconds = self.durations.encode.at(sum(map(len, groups)))
        return Took(seconds, (seconds, *(TOKEN for _ in groups)))


class Rollout(TakesTurns):
    """Stands for ``RolloutActor``."""

    service = "rollout"

    def load(
        self,
        backend: str | None,
        manifest: Manifest,
        sent: Sequence[int],
        *shards: ObjectRef[object],
    ) -> Took:
        """The acknowledgement."""
        loaded = WeightsId(manifest.version, manifest.checksum, backend)
        return Took(self.durations.load.at(1), loaded)

    def explore(self, request: ExploreChunk, conditioning: object) -> Took:
        """Seconds, images, samples."""
        seconds = self.durations.explore.at(len(request.seeds))
        return Took(seconds, (seconds, TOKEN, TOKEN))

    def probe(self, request: Probe, conditioning: object) -> Took:
        """What the learner's has."""
        return Took(self.durations.explore.at(len(request.seeds)), SAME)


class Reward(Simulated):
    """Stands for ``RewardActor``; scores are random and all different."""

    def __init__(
        self, durations: Durations, index: int, replicas: int, backend: str | None, kind: str
    ):
        super().__init__(durations, index, replicas, backend)
        self._kind, self._chance = kind, np.random.default_rng(index)

    def score(
        self,
        images: object,
        prompts: list[str],
        metadata: list[Metadata],
        labels: tuple[str, ...] = (),
        cached: bool = False,
    ) -> Took:
        """Float32 [B] by label."""
        return self._scored(len(prompts), labels)

    def compare(
        self, prompt: str, metadata: Metadata, labels: tuple[str, ...], *images: Sized
    ) -> Took:
        """Float32 [N] by label."""
        return self._scored(sum(len(part) for part in images), labels)

    def _scored(self, count: int, labels: tuple[str, ...]) -> Took:
        line = self.durations.score.get(self._kind)
        values = {label: self._chance.random(count, np.float32) for label in labels}
        return Took(line.at(count) if line else 0.0, Scores(values))


class Selector(Simulated):
    """The selector itself: it needs no tensors."""

    def __init__(
        self, durations: Durations, index: int, replicas: int, backend: str | None, tree: Tree
    ):
        super().__init__(durations, index, replicas, backend)
        self._real = SelectorActor(tree)

    def select(self, iteration: int, prompt: int, rewards: Floats) -> Took:
        """Indices."""
        return Took(self.durations.select.at(1), self._real.select(iteration, prompt, rewards))


class Learner(TakesTurns):
    """Stands for ``LearnerActor``."""

    service = "learner"

    def __init__(
        self,
        durations: Durations,
        index: int,
        replicas: int,
        backend: str | None,
        shards: Sequence[int],
        dealing: Dealing = ONE_STEP,
        run_seed: int = 0,
        regenerating: float | None = None,
    ):
        """``regenerating``: cores of a call that makes what is trained on; None: of every call."""
        super().__init__(durations, index, replicas, backend)
        self._shards, self._regenerating = tuple(shards), regenerating
        self._dealing, self._seed = dealing, run_seed

    def rendezvous(self, timeout_s: float) -> Took:
        """An address."""
        return Took(0.0, Rendezvous("simulated", 0, timeout_s))

    def join(self, rank: int, size: int, at: Rendezvous) -> Took:
        """Nothing to do."""
        return Took(0.0, None)

    def generate(self, request: GenerateRequest, conditioning: object) -> Took:
        """Seconds, images, samples."""
        count, gathering = len(request.seeds), self.durations.gathering
        seconds = self.durations.generate.at(count) + gathering.generating(count, self.replicas)
        wanted = self._regenerating if request.weights is None else None
        return Took(seconds, (seconds, TOKEN, TOKEN), wanted=wanted)

    def stand_by(self, request: GenerateRequest) -> Took:
        """Nothing of its own: the round takes as long as those that generate."""
        return Took(0.0, None)

    def update(self, request: UpdateRequest, told: AllRewards) -> Took:
        """No metrics; a part for each optimizer step, with its samples here."""
        line, together = self.durations.update, self.durations.summing.at(self.replicas)
        counts = self._dealt(request, told)
        gathered = self.durations.gathering.training(1, self.replicas)
        fixed = line.fixed / len(counts)
        steps = [fixed + (line.each + gathered) * count for count in counts]
        return Took(sum(steps), dict[str, float](), steps, together / len(counts))

    def _dealt(self, request: UpdateRequest, told: AllRewards) -> list[int]:
        """How many of this replica's samples each optimizer step has."""
        first = dict(zip(told.prompts, np.cumsum((0, *told.counts)), strict=False))
        places = [
            np.arange(portion.rows.start, portion.rows.stop) + first[portion.prompt]
            for portion in request.portions
        ]
        seed = stream_seed(self._seed, "shuffle", request.iteration)
        dealt = _steps_of(self._dealing, sum(told.counts), seed)
        return np.bincount(dealt[np.concatenate(places)], minlength=int(dealt.max()) + 1).tolist()

    def export(self, version: int, backend: str | None = None, weights: str | None = None) -> Took:
        """A manifest of the right size."""
        names = tuple(f"{version}-{index}" for index in range(len(self._shards)))
        manifest = Manifest(version, "simulated", 0, self._shards, names, ())
        seconds = self.durations.export.at(1) + self.durations.gathering.publishing(self.replicas)
        return Took(seconds, Exported(manifest, {}))

    def probe(self, request: Probe, conditioning: object) -> Took:
        """What the rollout actors' have."""
        return Took(self.durations.explore.at(len(request.seeds)), SAME)

    def shard(self, index: int) -> Took:
        """Bytes, and a token."""
        return Took(self.durations.shard.at(1), (self._shards[index], TOKEN))


@functools.lru_cache(maxsize=1)
def _steps_of(dealing: Dealing, total: int, seed: int) -> np.ndarray:
    """All replicas ask for the same."""
    return dealing.steps_of(total, seed)
