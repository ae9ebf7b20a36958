"""Scores of images that live in the object store, with retries; what is dropped is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from ray import ObjectRef

from actors.calls import Task
from actors.clients import RewardClient
from actors.messages import Floats, Images, Scores
from cluster.runtime.pool import ActorPool
from configs.prompts import Prompt
from configs.rewards import Rewards
from records.errors import InputsLost, RunFailed
from rewards.combine import Combination

Labels = tuple[str, ...]


@dataclass(frozen=True)
class RewardService:
    """The pools that score: one for the scorers that share actors, and one for each that has actors
    of its own. ``groups``: by kind, a pool and the labels of the scorers that its actors hold.
    """

    groups: Mapping[str, tuple[ActorPool, Labels]]

    @property
    def pools(self) -> list[ActorPool]:
        """Every pool of the service."""
        return [pool for pool, _ in self.groups.values()]


@dataclass(frozen=True)
class Scored:
    """Combined rewards float32 [B] (NaN: dropped), and raw scores float32 [B] by scorer label."""

    rewards: Floats
    values: dict[str, Floats]
    combination: Combination

    @staticmethod
    def concatenate(parts: Sequence[Scored]) -> Scored:
        """Parts of one prompt's candidates, in order, combined anew: a normalisation is over all of
        them.
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
        scorers = rewards.everyone if evaluation else rewards.scorers
        self._labels = tuple(scorer.label for scorer in scorers)
        self.scored = self.dropped = self.stood_in = 0  # images
        self._last_failure = ""
        self._sums: dict[str, list[float]] = {}
        self._speed: dict[str, tuple[float, float]] = {}  # label -> images, seconds

    async def score(
        self,
        key: object,
        images: ObjectRef[Images],
        prompts: list[Prompt],
        priority: tuple[int, ...],
    ) -> Scored:
        """Rewards of B images, one prompt each. Raises InputsLost when the images are gone."""
        task = Task(("score", key), priority, _fault, self._rewards.attempts)
        outcomes = await asyncio.gather(
            *(
                self._ask(pool, mine, task, images, prompts)
                for pool, labels in self._service.groups.values()
                if (mine := tuple(label for label in labels if label in self._labels))
            ),
            return_exceptions=True,
        )
        ends = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        # images can be made again: what ends the run comes first
        for end in sorted(ends, key=lambda end: isinstance(end, InputsLost)):
            raise end
        answers = [outcome for outcome in outcomes if isinstance(outcome, Scores)]
        given = {label: values for answer in answers for label, values in answer.values.items()}
        values = {label: given[label] for label in self._labels}
        rewards = self.combination(values)
        self._count(rewards, values, answers)
        return Scored(rewards, values, self.combination)

    def check_share(self) -> None:
        """Raises RunFailed when more images were dropped than configured."""
        if self.scored and self.dropped / self.scored > self._rewards.max_failed_share:
            raise RunFailed(
                f"scoring failed for {self.dropped} of {self.scored} images, more than"
                f" rewards.max_failed_share = {self._rewards.max_failed_share:g} allows; last:"
                f" {self._last_failure}"
            )

    def scorer_means(self) -> dict[str, float]:
        """Metrics of the scorers: mean raw scores over everything scored and of their parts
        (``reward/<label>``, ``reward/<label>/<part>``), their speeds, and for how many images an
        optional scorer's mean stood in for its score.
        """
        means = {f"reward/{label}": float(np.mean(v)) for label, v in self._sums.items() if v}
        stood_in = {"rewards/stood_in": self.stood_in} if self.combination.optional else {}
        return means | self.speeds() | stood_in

    def speeds(self) -> dict[str, float]:
        """``rewards/images_per_s/<label>``: images per second of each scorer while it works."""
        return {
            f"rewards/images_per_s/{label}": count / seconds
            for label, (count, seconds) in self._speed.items()
            if seconds  # all of it from an actor's memory: no work
        }

    async def _ask(
        self,
        pool: ActorPool,
        labels: Labels,
        task: Task[Scores],
        images: ObjectRef[Images],
        prompts: list[Prompt],
    ) -> Scores:
        """One pool's scores. Where every actor that took the task died of it or was silent, they
        are dropped and counted like those of a scorer that raised, unless the whole pool is gone.
        """
        texts = [prompt.text for prompt in prompts]
        metadata = [prompt.metadata for prompt in prompts]
        try:
            client = RewardClient(pool)
            return await client.score(task, images, texts, metadata, labels, self._evaluation)
        except RunFailed as end:
            if not pool.alive:
                raise
            missing = np.full(len(prompts), np.nan, np.float32)
            return Scores(dict.fromkeys(labels, missing), (str(end),))

    def _count(self, rewards: Floats, values: dict[str, Floats], answers: Sequence[Scores]) -> None:
        self.scored += len(rewards)
        self.dropped += int((~np.isfinite(rewards)).sum())
        for label in self.combination.optional:
            self.stood_in += int((~np.isfinite(values[label])).sum())
        for answer in answers:
            self._last_failure = _fault(answer) or self._last_failure
            for label, found in (answer.values | answer.parts).items():
                self._sums.setdefault(label, []).extend(found[np.isfinite(found)].tolist())
            for label, (count, seconds) in answer.work.items():
                before = self._speed.get(label, (0.0, 0.0))
                self._speed[label] = before[0] + count, before[1] + seconds


def _fault(answer: Scores) -> str | None:
    """Why an answer should be tried again: what failed in it."""
    return "; ".join(answer.failures) or None
