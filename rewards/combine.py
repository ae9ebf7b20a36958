"""From the scores of several scorers to one reward per image."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np

from configs.rewards import Rewards
from records.errors import described
from rewards import build
from rewards.base import Metadata, Scorer, ScorerError, check, require_images
from rewards.clips import Asked, as_clips, as_images


def combine(scores: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """Weighted sum over labels: float32 [B], summed in float64 in the order of ``weights``.

    An image that misses a score (NaN) has no reward (NaN), whatever that scorer's weight. Raises
    ValueError when labels or lengths differ.
    """
    if set(scores) != set(weights):
        raise ValueError(
            f"scores of {sorted(scores)} but weights of {sorted(weights)}: every scorer needs both"
        )
    if not scores:
        raise ValueError("no scorer: a reward needs at least one")
    lengths = {label: len(values) for label, values in scores.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"scorers scored different numbers of images: {lengths}")
    total = np.zeros(next(iter(lengths.values())), np.float64)
    missing = np.zeros(len(total), bool)
    for label, weight in weights.items():
        values = np.asarray(scores[label], np.float64)
        there = np.isfinite(values)
        if not there.all():
            missing |= ~there
            values = np.where(there, values, 0.0)
        total += weight * values
    if missing.any():
        total[missing] = np.nan
    return total.astype(np.float32)


def zscore(values: np.ndarray) -> np.ndarray:
    """float [B] less its mean, over its population deviation; zeros where all are equal."""
    spread = values.std()
    # a spread of roundings alone would be blown up to a ranking
    if spread <= 1e-8 * max(1.0, float(np.abs(values).max())):
        return np.zeros_like(values)
    return (values - values.mean()) / spread


def rank(values: np.ndarray) -> np.ndarray:
    """float [B] -> evenly spaced from -1 (least) to 1 (greatest); equal values share their mean."""
    if len(values) < 2:
        return np.zeros_like(values)
    ordered = np.sort(values)
    below = np.searchsorted(ordered, values, "left")
    upto = np.searchsorted(ordered, values, "right")
    return (below + upto - 1) / (len(values) - 1) - 1.0


NORMALIZERS = {"zscore": zscore, "rank": rank}


@dataclass(frozen=True)
class Combination:
    """From raw scores of a prompt's group to rewards: floors, normalization, the weighted sum.

    A required scorer that gave no score leaves the image without a reward. In place of an
    optional one's stands its mean over the rest of the group, which changes no order among images
    that have it; where it gave none at all it is left out. ``compared``: scorers whose scores
    order the images of a prompt and say nothing else.
    """

    weights: Mapping[str, float]
    floors: Mapping[str, float] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    normalize: str = "none"
    compared: frozenset[str] = frozenset()

    @classmethod
    def from_config(cls, rewards: Rewards) -> Combination:
        """The combination that ``[rewards]`` asks for."""
        return cls(
            {scorer.label: scorer.weight for scorer in rewards.scorers},
            {scorer.label: scorer.floor for scorer in rewards.scorers if scorer.floor is not None},
            frozenset(scorer.label for scorer in rewards.scorers if not scorer.required),
            rewards.normalize,
            frozenset(scorer.label for scorer in rewards.scorers if scorer.per == "prompt"),
        )

    @property
    def for_evaluation(self) -> Combination:
        """For images of many prompts, comparable over time: required scorers that compare nothing,
        not normalized.
        """
        kept = self._of(self.weights.keys() - self.optional)
        return replace(kept, normalize="none")

    @property
    def uncompared(self) -> Combination:
        """Without the scorers that compare."""
        return self._of(self.weights.keys())

    def _of(self, labels: Set[str]) -> Combination:
        kept = {k: w for k, w in self.weights.items() if k in labels and k not in self.compared}
        floors = {label: floor for label, floor in self.floors.items() if label in kept}
        return Combination(kept, floors, self.optional & kept.keys(), self.normalize)

    def __call__(self, scores: Mapping[str, np.ndarray]) -> np.ndarray:
        """Scores float32 [B] by label -> rewards float32 [B], NaN where there is none.

        Labels without a weight do not count.
        """
        used = {label: np.asarray(scores[label], np.float32) for label in self.weights}
        if not self.floors and not self.optional and self.normalize == "none":
            return combine(used, self.weights)
        for label, floor in self.floors.items():
            used[label] = np.where(
                np.isfinite(used[label]), np.maximum(used[label], np.float32(floor)), np.nan
            )
        scored = np.all(
            [np.isfinite(values) for label, values in used.items() if label not in self.optional],
            axis=0,
        )
        for label in self.optional & used.keys():
            there = np.isfinite(used[label])
            known = used[label][scored & there]
            used[label] = np.where(there, used[label], known.mean() if len(known) else 0.0)
        if self.normalize != "none" and scored.any():
            used = {label: self._normalized(values, scored) for label, values in used.items()}
        return combine(used, self.weights)

    def missing(self, scores: Mapping[str, np.ndarray]) -> int:
        """How many images have no reward: a required scorer gave them no score."""
        required = [label for label in self.weights if label not in self.optional]
        there = np.logical_and.reduce([np.isfinite(scores[label]) for label in required])
        return int(np.size(there) - np.count_nonzero(there))

    def _normalized(self, values: np.ndarray, scored: np.ndarray) -> np.ndarray:
        made = np.full(len(values), np.nan)
        made[scored] = NORMALIZERS[self.normalize](values[scored].astype(np.float64))
        return made


@dataclass(frozen=True)
class Combined:
    """Rewards of one batch."""

    total: np.ndarray  # float32 [B], weighted sum
    scores: dict[str, np.ndarray]  # label -> float32 [B], unweighted
    parts: dict[str, np.ndarray] = field(default_factory=dict)  # "label/part" -> float32 [B]


@dataclass(frozen=True)
class Attempt:
    """Scores of one batch, some of which may be missing."""

    scores: dict[str, np.ndarray]  # label -> float32 [B], NaN where there is none
    parts: dict[str, np.ndarray]  # "label/part" -> float32 [B]
    failures: tuple[str, ...]  # one line per scorer that failed
    # label -> images, or frames, that it scored, and its seconds
    work: dict[str, tuple[int, float]] = field(default_factory=dict)


class WeightedScorer:
    """Scorers of a configuration as one, in one process."""

    def __init__(
        self,
        scorers: Mapping[str, Scorer],
        weights: Mapping[str, float],
        combination: Combination | None = None,
        frames: int | None = None,
    ) -> None:
        """``frames``: of a clip, so many are scored by a scorer of images; None: all."""
        self.scorers, self.weights, self.frames = dict(scorers), dict(weights), frames
        self.combination = combination or Combination(self.weights)

    @classmethod
    def from_config(
        cls, rewards: Rewards, labels: Collection[str] | None = None, device: str | None = None
    ) -> WeightedScorer:
        """Build the scorers of ``[rewards]`` on ``device``. Raises ScorerSetupError.

        ``labels``: exactly these, held-out ones among them; None: those that are trained on.
        """
        wanted = {scorer.label for scorer in rewards.scorers} if labels is None else set(labels)
        scorers = {
            scorer.label: build(scorer, device)
            for scorer in rewards.everyone
            if scorer.label in wanted
        }
        weights = {
            scorer.label: scorer.weight for scorer in rewards.scorers if scorer.label in wanted
        }
        return cls(scorers, weights, Combination.from_config(rewards), rewards.frames)

    def attempt(
        self,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[Metadata],
        labels: Collection[str] | None = None,
    ) -> Attempt:
        """Score uint8 [B, 3, H, W], or clips [B, F, 3, H, W], by every scorer, or those of
        ``labels``.

        Where one fails its scores are NaN, and the others' stand.
        """
        require_images(images, prompts, metadata, clips=True)
        images = images.view()  # not writeable, so that no scorer can change what the next one sees
        images.flags.writeable = False
        batch = Asked(images, prompts, metadata)
        single = as_images(batch, self.frames)  # once, so that scorers share what they make of it
        scores: dict[str, np.ndarray] = {}
        parts: dict[str, np.ndarray] = {}
        failures: list[str] = []
        work: dict[str, tuple[int, float]] = {}
        for label, scorer in self.scorers.items():
            if labels is not None and label not in labels:
                continue
            asked = as_clips(batch) if getattr(scorer, "clips", False) else single
            start = time.perf_counter()
            try:
                answer = scorer(asked.images, asked.prompts, asked.metadata)
            # a user's scorer may raise anything; it is said, counted and retried, never scored
            except Exception as error:
                if type(error).__name__ == "OutOfMemoryError":  # torch's: no try would go better
                    raise
                failures.append(f"scorer {label!r} raised {described(error)}")
                scores[label] = np.full(len(images), np.nan, np.float32)
                continue
            work[label] = len(asked.images), time.perf_counter() - start
            values, problem = check(answer, len(asked.images))
            scores[label] = asked.means(values)
            if problem:
                failures.append(f"scorer {label!r} {problem}")
            told, problem = _parts_of(scorer, len(asked.images))
            parts |= {f"{label}/{name}": asked.means(found) for name, found in told.items()}
            if problem:
                failures.append(f"scorer {label!r} {problem}")
        return Attempt(scores, parts, tuple(failures), work)

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> Combined:
        """Scores as one group and combines. Raises ScorerError where a scorer fails."""
        made = self.attempt(images, prompts, metadata)
        if made.failures:
            raise ScorerError(made.failures[0])
        return Combined(self.combination(made.scores), made.scores, made.parts)


def _parts_of(scorer: Scorer, count: int) -> tuple[dict[str, np.ndarray], str | None]:
    """(float32 [count] by name, what was wrong or None) of the parts of a scorer's last call. NaN
    is a part that an image has not.
    """
    told: object = getattr(scorer, "parts", None) or {}
    if not isinstance(told, Mapping):
        return {}, f"has parts that are {type(told).__name__}, no dict of float32 [{count}]"
    found: dict[str, np.ndarray] = {}
    problem = None
    for name, value in told.items():
        try:
            values = np.asarray(value, np.float32)
        except (TypeError, ValueError, OverflowError):
            values = np.empty(0, np.float32)
        if values.shape == (count,):
            found[str(name)] = values
        else:
            problem = f"has a part {name!r} that is no float32 [{count}]"
    return found, problem
