"""Combination of the scores of several scorers into one reward per image."""

from __future__ import annotations

import time
import traceback
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from configs.rewards import Rewards
from records.errors import error_summary
from rewards import build
from rewards.base import Metadata, Scorer, ScorerError, ScorerUnreachable, check, require_images
from rewards.clips import ScorerInput, as_clips, as_images


def combine(scores: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """Return the weighted sum over labels, float32 [B], in float64 in the order of ``weights``.

    An image without a score (NaN) has no reward (NaN), whatever the scorer's weight. Raises
    ValueError if labels or lengths differ.
    """
    if set(scores) != set(weights):
        raise ValueError(
            f"scores of {sorted(scores)} but weights of {sorted(weights)}: every scorer needs a"
            " score and a weight"
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
    """Return (values - mean) / population standard deviation, or zeros if all are equal."""
    spread = values.std()
    # otherwise differences by rounding alone would become a ranking
    if spread <= 1e-8 * max(1.0, float(np.abs(values).max())):
        return np.zeros_like(values)
    return (values - values.mean()) / spread


def rank(values: np.ndarray) -> np.ndarray:
    """Map values [B] to their ranks, evenly spaced in [-1, 1]; ties get their mean rank."""
    if len(values) < 2:
        return np.zeros_like(values)
    ordered = np.sort(values)
    below = np.searchsorted(ordered, values, "left")
    upto = np.searchsorted(ordered, values, "right")
    return (below + upto - 1) / (len(values) - 1) - 1.0


NORMALIZERS = {"zscore": zscore, "rank": rank}


@dataclass(frozen=True)
class Combination:
    """Computes rewards of a prompt's group from raw scores: floors, normalization, weighted sum.

    An image without a score of a required scorer has no reward. A missing score of an optional
    scorer is replaced by its mean over the rest of the group, which does not change the order of
    the others; an optional scorer without any score is left out. ``compared`` are scorers whose
    scores only order the images of a prompt.
    """

    weights: Mapping[str, float]
    floors: Mapping[str, float] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    normalize: str = "none"
    compared: frozenset[str] = frozenset()

    @classmethod
    def from_config(cls, rewards: Rewards) -> Combination:
        """Return the combination configured in ``[rewards]``."""
        return cls(
            {scorer.label: scorer.weight for scorer in rewards.scorers},
            {scorer.label: scorer.floor for scorer in rewards.scorers if scorer.floor is not None},
            frozenset(scorer.label for scorer in rewards.scorers if not scorer.required),
            rewards.normalize,
            frozenset(scorer.label for scorer in rewards.scorers if scorer.per == "prompt"),
        )

    @property
    def for_evaluation(self) -> Combination:
        """The combination for evaluations, comparable between prompts and over time.

        It has only required scorers that do not compare images, without normalization.
        """
        kept = self._of(self.weights.keys() - self.optional)
        return replace(kept, normalize="none")

    @property
    def uncompared(self) -> Combination:
        """The combination without scorers that compare images."""
        return self._of(self.weights.keys())

    def _of(self, labels: Set[str]) -> Combination:
        kept = {k: w for k, w in self.weights.items() if k in labels and k not in self.compared}
        floors = {label: floor for label, floor in self.floors.items() if label in kept}
        return Combination(kept, floors, self.optional & kept.keys(), self.normalize)

    def __call__(self, scores: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return rewards float32 [B], NaN if missing, from scores float32 [B] by label.

        Labels without a weight are ignored.
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
        """Return the number of images without a reward, as a required scorer gave no score."""
        required = [label for label in self.weights if label not in self.optional]
        there = np.logical_and.reduce([np.isfinite(scores[label]) for label in required])
        return int(np.size(there) - np.count_nonzero(there))

    def _normalized(self, values: np.ndarray, scored: np.ndarray) -> np.ndarray:
        normalized = np.full(len(values), np.nan)
        normalized[scored] = NORMALIZERS[self.normalize](values[scored].astype(np.float64))
        return normalized


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
    unreachable: dict[str, str]  # label -> the line of a scorer whose server cannot be reached
    # label -> images, or frames, that it scored, and its seconds
    work: dict[str, tuple[int, float]] = field(default_factory=dict)


class WeightedScorer:
    """The scorers of a configuration, called together in one process."""

    def __init__(
        self,
        scorers: Mapping[str, Scorer],
        weights: Mapping[str, float],
        combination: Combination | None = None,
        frames: int | None = None,
    ) -> None:
        """``frames`` is the number of frames of a clip that image scorers score; None: all."""
        self.scorers, self.weights, self.frames = dict(scorers), dict(weights), frames
        self.combination = combination or Combination(self.weights)

    @classmethod
    def from_config(
        cls, rewards: Rewards, labels: Collection[str] | None = None, device: str | None = None
    ) -> WeightedScorer:
        """Create the scorers of ``[rewards]`` on ``device``. Raises ScorerSetupError.

        ``labels`` selects them, including held-out scorers; None means those that are trained on.
        """
        requested = {scorer.label for scorer in rewards.scorers} if labels is None else set(labels)
        scorers = {
            scorer.label: build(scorer, device)
            for scorer in rewards.all_scorers
            if scorer.label in requested
        }
        weights = {
            scorer.label: scorer.weight for scorer in rewards.scorers if scorer.label in requested
        }
        return cls(scorers, weights, Combination.from_config(rewards), rewards.frames)

    def attempt(
        self,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[Metadata],
        labels: Collection[str] | None = None,
    ) -> Attempt:
        """Score uint8 [B, 3, H, W], or clips [B, F, 3, H, W], by all scorers or by ``labels``.

        A scorer that fails gives NaN; the scores of the others are unaffected.
        """
        require_images(images, prompts, metadata, clips=True)
        images = images.view()  # read-only, so that no scorer can change what the next one sees
        images.flags.writeable = False
        batch = ScorerInput(images, prompts, metadata)
        single = as_images(batch, self.frames)  # once, so that scorers share preprocessed images
        scores: dict[str, np.ndarray] = {}
        parts: dict[str, np.ndarray] = {}
        failures: list[str] = []
        unreachable: dict[str, str] = {}
        work: dict[str, tuple[int, float]] = {}
        for label, scorer in self.scorers.items():
            if labels is not None and label not in labels:
                continue
            requested = as_clips(batch) if getattr(scorer, "clips", False) else single
            start = time.perf_counter()
            try:
                answer = scorer(requested.images, requested.prompts, requested.metadata)
            # a custom scorer may raise anything: it is reported, counted and retried, never scored
            except Exception as error:
                if type(error).__name__ == "OutOfMemoryError":  # torch's; a retry would fail too
                    raise
                failures.append(f"scorer {label!r} raised {error_summary(error)}{_place_of(error)}")
                if isinstance(error, ScorerUnreachable):
                    unreachable[label] = failures[-1]
                scores[label] = np.full(len(images), np.nan, np.float32)
                continue
            work[label] = len(requested.images), time.perf_counter() - start
            values, problem = check(answer, len(requested.images))
            scores[label] = requested.reduce(values)
            if problem:
                failures.append(f"scorer {label!r} {problem}")
            own, problem = _parts_of(scorer, len(requested.images))
            parts |= {f"{label}/{name}": requested.reduce(part) for name, part in own.items()}
            if problem:
                failures.append(f"scorer {label!r} {problem}")
        return Attempt(scores, parts, tuple(failures), unreachable, work)

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> Combined:
        """Score images as one group and combine the scores. Raises ScorerError for a failure."""
        attempt = self.attempt(images, prompts, metadata)
        if attempt.failures:
            raise ScorerError(attempt.failures[0])
        return Combined(self.combination(attempt.scores), attempt.scores, attempt.parts)


def _place_of(error: Exception) -> str:
    """Return the line of a scorer's own code that raised ``error``, for example " (mine.py:12)".

    Empty for errors that say what is wrong in the user's words, and where no such line is known.
    """
    # the first frame is the call of the scorer
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if "site-packages" not in Path(frame.filename).parts]
    if isinstance(error, ScorerError) or not own:
        return ""
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})"


def _parts_of(scorer: Scorer, count: int) -> tuple[dict[str, np.ndarray], str | None]:
    """Check the parts of a scorer's last call; return (float32 [count] by name, problem or None).

    NaN means that an image does not have a part.
    """
    parts: object = getattr(scorer, "parts", None) or {}
    if not isinstance(parts, Mapping):
        return {}, f"has parts of type {type(parts).__name__}, not a dict of float32 [{count}]"
    checked: dict[str, np.ndarray] = {}
    problem = None
    for name, value in parts.items():
        try:
            values = np.asarray(value, np.float32)
        except (TypeError, ValueError, OverflowError):
            values = np.empty(0, np.float32)
        if values.shape == (count,):
            checked[str(name)] = values
        else:
            problem = f"has a part {name!r} that is not float32 [{count}]"
    return checked, problem
