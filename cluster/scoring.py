"""Scores of pictures that live in the object store, with retries, and with what was dropped counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.messages import Scores
from cluster.errors import RunFailed
from cluster.pool import ActorPool
from configs.prompts import Prompt
from configs.schema import Rewards
from rewards.combine import combine


@dataclass(frozen=True)
class Scored:
    """Combined rewards float32 [B] (NaN: dropped) and raw scores per scorer label, each float32 [B]."""

    rewards: np.ndarray
    values: dict[str, np.ndarray]

    @staticmethod
    def concatenate(parts: list[Scored]) -> Scored:
        """Parts of one prompt's pool, in order."""
        labels = parts[0].values
        return Scored(
            np.concatenate([part.rewards for part in parts]),
            {label: np.concatenate([part.values[label] for part in parts]) for label in labels},
        )


class Scoring:
    """The scoring of one iteration or evaluation."""

    def __init__(self, rewards: Rewards, pool: ActorPool):
        self._rewards, self._pool = rewards, pool
        self.scored = 0
        self.dropped = 0
        self._last_failure = ""
        self._sums: dict[str, list[float]] = {}

    async def score(self, key: Any, images: Any, prompts: list[Prompt], priority: tuple[int, ...]) -> Scored:
        """Rewards of the images behind the reference, one prompt each. Raises InputsLost when the images are gone."""
        answer: Scores = await self._pool.call(
            ("score", key),
            "score",
            images,
            [prompt.text for prompt in prompts],
            [prompt.metadata for prompt in prompts],
            priority=priority,
            accept=_fault,
            tries=self._rewards.attempts,
        )
        weights = {scorer.label: scorer.weight for scorer in self._rewards.scorers}
        rewards = combine(answer.values, weights)
        self.scored += len(rewards)
        self.dropped += int((~np.isfinite(rewards)).sum())
        self._last_failure = _fault(answer) or self._last_failure
        for label, values in (answer.values | answer.parts).items():
            self._sums.setdefault(label, []).extend(values[np.isfinite(values)].tolist())
        return Scored(rewards, answer.values)

    def check_share(self) -> None:
        """Raises RunFailed when more samples were dropped than configured."""
        if self.scored and self.dropped / self.scored > self._rewards.max_failed_share:
            raise RunFailed(
                f"scoring failed for {self.dropped} of {self.scored} pictures, more than rewards.max_failed_share = "
                f"{self._rewards.max_failed_share:g} allows; last: {self._last_failure}"
            )

    def scorer_means(self) -> dict[str, float]:
        """Mean raw score per scorer over everything scored, and of its parts: ``reward/<label>``, ``reward/<label>/<part>``."""
        return {f"reward/{label}": float(np.mean(values)) for label, values in self._sums.items() if values}


def _fault(answer: Scores) -> str | None:
    """Why an answer should be tried again: what failed in it."""
    return "; ".join(answer.failures) or None
