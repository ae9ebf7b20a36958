"""Simulated actors that take time and return messages of the right shape, without tensors.

Each method has the name, arguments and answer type of the method of the real actor that it
replaces; a value that would be passed by reference is a ``Token``.
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
from learner.step_assignment import StepAssignment
from planning.durations import Durations
from policy.precision.manifest import Manifest
from policy.sampling.noise import stream_seed


@dataclass(frozen=True)
class Token:
    """Placeholder for a value that a real actor would have produced."""


TOKEN = Token()
ONE_STEP = StepAssignment()
SAME = ProbeResult(np.zeros((1, 1), np.float32), "simulated")


@dataclass(frozen=True)
class TimedAnswer:
    """An answer, and the seconds of work that it takes if the actor runs alone.

    ``steps``: seconds of the parts of the work; after each, all replicas wait for each other and
    then need ``together`` seconds. ``requested``: the cores that the call uses; None: those of the
    actor's other calls.
    """

    seconds: float
    value: object
    steps: Sequence[float] = ()
    together: float = 0.0
    requested: float | None = None


class Simulated:
    """Base class of all simulated actors."""

    def __init__(self, durations: Durations, index: int, replicas: int, backend: str | None):
        self.durations, self.index = durations, index
        self.replicas, self.backend = replicas, backend

    def ready(self) -> TimedAnswer:
        """Return the actor's info at once, as if its models were loaded."""
        return TimedAnswer(0.0, ActorInfo(0, "simulated", backend=self.backend))


class TakesTurns(Simulated):
    """Base class of simulated actors that may leave a GPU between their turns."""

    service = ""

    def begin_turn(self) -> TimedAnswer:
        """Move the weights back to the GPU."""
        return self._moves()

    def end_turn(self) -> TimedAnswer:
        """Move the weights to host memory."""
        return self._moves()

    def _moves(self) -> TimedAnswer:
        seconds = self.durations.move.get(self.service, 0.0)
        return TimedAnswer(seconds, Moved(0, seconds))


class Encoder(Simulated):
    """Simulated ``EncoderActor``."""

    def encode(
        self, groups: list[list[str]], images: list[list[Images]] | None = None
    ) -> TimedAnswer:
        """Return the seconds and a token per group."""
        seconds = self.durations.encode.at(sum(map(len, groups)))
        return TimedAnswer(seconds, (seconds, *(TOKEN for _ in groups)))


class Rollout(TakesTurns):
    """Simulated ``RolloutActor``."""

    service = "rollout"

    def load(
        self,
        backend: str | None,
        manifest: Manifest,
        sent: Sequence[int],
        *shards: ObjectRef[object],
    ) -> TimedAnswer:
        """Acknowledge the loaded weights."""
        loaded = WeightsId(manifest.version, manifest.checksum, backend)
        return TimedAnswer(self.durations.load.at(1), loaded)

    def explore(self, request: ExploreChunk, conditioning: object) -> TimedAnswer:
        """Return no saturated activations, and tokens for images and samples."""
        seconds = self.durations.explore.at(len(request.seeds))
        return TimedAnswer(seconds, (None, TOKEN, TOKEN))

    def probe(self, request: Probe, conditioning: object) -> TimedAnswer:
        """Return the same result as the learner's probe."""
        return TimedAnswer(self.durations.explore.at(len(request.seeds)), SAME)


class Reward(Simulated):
    """Simulated ``RewardActor``; scores are random and all different."""

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
    ) -> TimedAnswer:
        """Return random scores by label, float32 [B]."""
        return self._scored(len(prompts), labels)

    def compare(
        self, prompt: str, metadata: Metadata, labels: tuple[str, ...], *images: Sized
    ) -> TimedAnswer:
        """Return random scores by label, float32 [N]."""
        return self._scored(sum(len(part) for part in images), labels)

    def _scored(self, count: int, labels: tuple[str, ...]) -> TimedAnswer:
        line = self.durations.score.get(self._kind)
        values = {label: self._chance.random(count, np.float32) for label in labels}
        return TimedAnswer(line.at(count) if line else 0.0, Scores(values))


class Selector(Simulated):
    """Simulated selector that calls the real one, which needs no tensors."""

    def __init__(
        self, durations: Durations, index: int, replicas: int, backend: str | None, tree: Tree
    ):
        super().__init__(durations, index, replicas, backend)
        self._real = SelectorActor(tree)

    def select(self, iteration: int, prompt: int, rewards: Floats) -> TimedAnswer:
        """Return the indices that the real selector chooses."""
        return TimedAnswer(
            self.durations.select.at(1), self._real.select(iteration, prompt, rewards)
        )


class Learner(TakesTurns):
    """Simulated ``LearnerActor``."""

    service = "learner"

    def __init__(
        self,
        durations: Durations,
        index: int,
        replicas: int,
        backend: str | None,
        shards: Sequence[int],
        dealing: StepAssignment = ONE_STEP,
        run_seed: int = 0,
        regenerating: float | None = None,
    ):
        """Create a learner replica.

        ``regenerating`` is the number of cores used by calls that generate samples to train on;
        None: the same as other calls.
        """
        super().__init__(durations, index, replicas, backend)
        self._shards, self._regenerating = tuple(shards), regenerating
        self._dealing, self._seed = dealing, run_seed

    def rendezvous(self, timeout_s: float) -> TimedAnswer:
        """Return a placeholder address."""
        return TimedAnswer(0.0, Rendezvous("simulated", 0, timeout_s))

    def join(self, rank: int, size: int, at: Rendezvous) -> TimedAnswer:
        """Do nothing, in no time."""
        return TimedAnswer(0.0, None)

    def generate(self, request: GenerateRequest, conditioning: object) -> TimedAnswer:
        """Return the seconds, and tokens for images and samples."""
        count, gathering = len(request.seeds), self.durations.gathering
        seconds = self.durations.generate.at(count) + gathering.generating(count, self.replicas)
        requested = self._regenerating if request.weights is None else None
        return TimedAnswer(seconds, (seconds, TOKEN, TOKEN), requested=requested)

    def stand_by(self, request: GenerateRequest) -> TimedAnswer:
        """Take no time: the round lasts as long as the replicas that generate."""
        return TimedAnswer(0.0, None)

    def update(self, request: UpdateRequest, all_rewards: AllRewards) -> TimedAnswer:
        """Return no metrics, with one part per optimizer step that takes its share of samples."""
        line, together = self.durations.update, self.durations.summing.at(self.replicas)
        counts = self._dealt(request, all_rewards)
        gathered = self.durations.gathering.training(1, self.replicas)
        fixed = line.fixed / len(counts)
        steps = [fixed + (line.each + gathered) * count for count in counts]
        return TimedAnswer(sum(steps), dict[str, float](), steps, together / len(counts))

    def _dealt(self, request: UpdateRequest, rewards: AllRewards) -> list[int]:
        """Return the number of this replica's samples in each optimizer step."""
        first_row = dict(zip(rewards.prompts, np.cumsum((0, *rewards.counts)), strict=False))
        rows = [
            np.arange(portion.rows.start, portion.rows.stop) + first_row[portion.prompt]
            for portion in request.portions
        ]
        seed = stream_seed(self._seed, "shuffle", request.iteration)
        assigned = _steps_of(self._dealing, sum(rewards.counts), seed)
        return np.bincount(
            assigned[np.concatenate(rows)], minlength=int(assigned.max()) + 1
        ).tolist()

    def export(
        self, version: int, backend: str | None = None, weights: str | None = None
    ) -> TimedAnswer:
        """Return a manifest with shards of the right sizes."""
        names = tuple(f"{version}-{index}" for index in range(len(self._shards)))
        manifest = Manifest(version, "simulated", 0, self._shards, names, ())
        seconds = self.durations.export.at(1) + self.durations.gathering.publishing(self.replicas)
        return TimedAnswer(seconds, Exported(manifest, {}))

    def probe(self, request: Probe, conditioning: object) -> TimedAnswer:
        """Return the same result as the rollout actors' probe."""
        return TimedAnswer(self.durations.explore.at(len(request.seeds)), SAME)

    def shard(self, index: int) -> TimedAnswer:
        """Return the bytes of a shard, and a token for its content."""
        return TimedAnswer(self.durations.shard.at(1), (self._shards[index], TOKEN))


@functools.lru_cache(maxsize=1)
def _steps_of(dealing: StepAssignment, total: int, seed: int) -> np.ndarray:
    """Return ``StepAssignment.assign``; cached because all replicas need the same array."""
    return dealing.assign(total, seed)
