"""From the scores of several scorers to one reward per picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from configs.schema import Rewards
from rewards import build
from rewards.base import Scorer, ScorerError, check, require_pictures


def combine(scores: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """Weighted sum over labels: float32 [B], summed in float64 in the order of ``weights``.

    A picture that misses a score (NaN) has no reward (NaN), whatever that scorer's weight. Raises ValueError when labels or
    lengths differ.
    """
    if set(scores) != set(weights):
        raise ValueError(f"scores of {sorted(scores)} but weights of {sorted(weights)}: every scorer needs both")
    if not scores:
        raise ValueError("no scorer: a reward needs at least one")
    lengths = {label: len(values) for label, values in scores.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"scorers scored different numbers of pictures: {lengths}")
    total = np.zeros(next(iter(lengths.values())), np.float64)
    missing = np.zeros(len(total), bool)
    for label, weight in weights.items():
        values = np.asarray(scores[label], np.float64)
        missing |= ~np.isfinite(values)
        total += weight * np.where(np.isfinite(values), values, 0.0)
    return np.where(missing, np.nan, total).astype(np.float32)


@dataclass(frozen=True)
class Scored:
    """Rewards of one batch."""

    total: np.ndarray  # float32 [B], weighted sum
    scores: dict[str, np.ndarray]  # label -> float32 [B], unweighted
    parts: dict[str, np.ndarray] = field(default_factory=dict)  # "label/part" -> float32 [B], where a scorer tells its parts


@dataclass(frozen=True)
class Attempt:
    """Scores of one batch, some of which may be missing."""

    scores: dict[str, np.ndarray]  # label -> float32 [B], NaN where there is none
    parts: dict[str, np.ndarray]  # "label/part" -> float32 [B]
    failures: tuple[str, ...]  # one line per scorer that failed


class WeightedScorer:
    """All scorers of a configuration as one, in one process."""

    def __init__(self, scorers: Mapping[str, Scorer], weights: Mapping[str, float]) -> None:
        self.scorers, self.weights = dict(scorers), dict(weights)

    @classmethod
    def from_config(cls, rewards: Rewards) -> WeightedScorer:
        """Build every scorer of ``[rewards]``. Raises ScorerSetupError."""
        scorers = {scorer.label: build(scorer) for scorer in rewards.scorers}
        return cls(scorers, {scorer.label: scorer.weight for scorer in rewards.scorers})

    def attempt(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Attempt:
        """Score uint8 [B, 3, H, W] by every scorer; one that fails marks its pictures missing and the others' scores stand."""
        require_pictures(images, prompts, metadata)
        scores: dict[str, np.ndarray] = {}
        parts: dict[str, np.ndarray] = {}
        failures: list[str] = []
        for label, scorer in self.scorers.items():
            try:
                answer = scorer(images, prompts, metadata)
            except Exception as error:  # a user's scorer may raise anything; it is said, counted and retried, never scored
                failures.append(f"scorer {label!r} raised {type(error).__name__}: {error}")
                scores[label] = np.full(len(images), np.nan, np.float32)
                continue
            scores[label], problem = check(answer, len(images))
            if problem:
                failures.append(f"scorer {label!r} {problem}")
            told = getattr(scorer, "parts", None) or {}
            parts |= {f"{label}/{name}": np.asarray(value, np.float32) for name, value in told.items()}
        return Attempt(scores, parts, tuple(failures))

    def __call__(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Scored:
        """As ``attempt``, weighted. Raises ScorerError naming the first scorer that raised or returned nonsense."""
        made = self.attempt(images, prompts, metadata)
        if made.failures:
            raise ScorerError(made.failures[0])
        return Scored(combine(made.scores, self.weights), made.scores, made.parts)
