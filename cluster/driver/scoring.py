"""Scores of pictures that live in the object store, with retries, and with what was dropped
counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.messages import Scores
from cluster.runtime.pool import ActorPool
from cluster.runtime.worker import Worker
from configs.prompts import Prompt
from configs.rewards import Rewards
from records.errors import InputsLost, RunFailed
from rewards.combine import Combination


class RewardService:
    """The pools that score: one for the scorers that share actors, and one for each that has actors
    of its own.
    """

    def __init__(self, groups: Mapping[str, tuple[ActorPool, tuple[str, ...]]]):
        """``groups``: by kind, a pool and the labels of the scorers that its actors hold."""
        self.groups = dict(groups)

    @property
    def pools(self) -> list[ActorPool]:
        """Every pool of the service."""
        return [pool for pool, _ in self.groups.values()]

    @property
    def workers(self) -> list[Worker]:
        """The workers of all pools."""
        return [worker for pool in self.pools for worker in pool.workers]


@dataclass(frozen=True)
class Scored:
    """Combined rewards float32 [B] (NaN: dropped) and raw scores per scorer label, each float32
    [B].
    """

    rewards: np.ndarray
    values: dict[str, np.ndarray]
    combination: Combination

    @staticmethod
    def concatenate(parts: list[Scored]) -> Scored:
        """Parts of one prompt's pool, in order, combined anew: a normalisation is over the whole
        pool.
        """
        labels, combination = parts[0].values, parts[0].combination
        values = {label: np.concatenate([part.values[label] for part in parts]) for label in labels}
        return Scored(combination(values), values, combination)


class Scoring:
    """The scoring of one iteration or evaluation.

    An evaluation asks held-out scorers too, combines without normalisation, and takes known scores
    from the actors' memory.
    """

    def __init__(self, rewards: Rewards, service: RewardService, evaluation: bool = False):
        self._rewards, self._service, self._evaluation = rewards, service, evaluation
        self.combination = Combination.from_config(rewards)
        if evaluation:
            self.combination = self.combination.for_evaluation
        self._labels = tuple(
            scorer.label for scorer in (rewards.everyone if evaluation else rewards.scorers)
        )
        self.scored = 0
        self.dropped = 0
        self.stood_in = 0
        self._last_failure = ""
        self._sums: dict[str, list[float]] = {}
        self._speed: dict[str, list[float]] = {}  # label -> pictures, seconds

    async def score(
        self, key: Any, images: Any, prompts: list[Prompt], priority: tuple[int, ...]
    ) -> Scored:
        """Rewards of the images behind the reference, one prompt each. Raises InputsLost when the
        images are gone.
        """
        asked = [
            (pool, mine)
            for pool, labels in self._service.groups.values()
            if (mine := self._of(labels))
        ]
        outcomes = await asyncio.gather(
            *(self._ask(pool, mine, key, images, prompts, priority) for pool, mine in asked),
            return_exceptions=True,
        )
        ends = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for end in sorted(
            ends, key=lambda end: isinstance(end, InputsLost)
        ):  # what ends the run comes first
            raise end
        answers = [outcome for outcome in outcomes if isinstance(outcome, Scores)]
        given = {label: values for answer in answers for label, values in answer.values.items()}
        values = {label: given[label] for label in self._labels}
        rewards = self.combination(values)
        self._count(rewards, values, answers)
        return Scored(rewards, values, self.combination)

    def check_share(self) -> None:
        """Raises RunFailed when more samples were dropped than configured."""
        if self.scored and self.dropped / self.scored > self._rewards.max_failed_share:
            raise RunFailed(
                f"scoring failed for {self.dropped} of {self.scored} pictures, more than"
                f" rewards.max_failed_share = {self._rewards.max_failed_share:g} allows; last:"
                f" {self._last_failure}"
            )

    def scorer_means(self) -> dict[str, float]:
        """What is logged about the scorers: mean raw scores over everything scored and of their
        parts (``reward/<label>``, ``reward/<label>/<part>``), pictures per second of each, and for
        how many an optional one was stood in for.
        """
        means = {
            f"reward/{label}": float(np.mean(values))
            for label, values in self._sums.items()
            if values
        }
        return (
            means
            | self.speeds()
            | ({"rewards/stood_in": self.stood_in} if self.combination.optional else {})
        )

    def speeds(self) -> dict[str, float]:
        """``rewards/images_per_s/<label>``: pictures per second of each scorer while it works; what
        an actor remembers is no work.
        """
        return {
            f"rewards/images_per_s/{label}": count / seconds
            for label, (count, seconds) in self._speed.items()
            if seconds
        }

    def _of(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(label for label in labels if label in self._labels)

    async def _ask(
        self,
        pool: ActorPool,
        labels: tuple[str, ...],
        key: Any,
        images: Any,
        prompts: list[Prompt],
        priority: tuple[int, ...],
    ) -> Scores:
        """One pool's scores. Where every actor that took the unit died of it or was silent, there
        are none: they are dropped and counted like those of a scorer that raised, unless the whole
        pool is gone.
        """
        try:
            return await pool.call(
                ("score", key),
                "score",
                images,
                [prompt.text for prompt in prompts],
                [prompt.metadata for prompt in prompts],
                labels,
                self._evaluation,
                priority=priority,
                accept=_fault,
                tries=self._rewards.attempts,
            )
        except RunFailed as end:
            if not pool.alive:
                raise
            return Scores(
                {label: np.full(len(prompts), np.nan, np.float32) for label in labels}, (str(end),)
            )

    def _count(
        self, rewards: np.ndarray, values: dict[str, np.ndarray], answers: list[Scores]
    ) -> None:
        self.scored += len(rewards)
        self.dropped += int((~np.isfinite(rewards)).sum())
        for label in self.combination.optional:
            self.stood_in += int((~np.isfinite(values[label])).sum())
        for answer in answers:
            self._last_failure = _fault(answer) or self._last_failure
            for label, found in (answer.values | answer.parts).items():
                self._sums.setdefault(label, []).extend(found[np.isfinite(found)].tolist())
            for label, (count, seconds) in answer.work.items():
                known = self._speed.setdefault(label, [0.0, 0.0])
                known[0] += count
                known[1] += seconds


def _fault(answer: Scores) -> str | None:
    """Why an answer should be tried again: what failed in it."""
    return "; ".join(answer.failures) or None
