"""Score images in the object store, with retries; images without a score are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from ray import ObjectRef

from actors.calls import Task
from actors.clients import RewardClient
from actors.messages import Floats, Images, Metadata, Scores
from cluster.driver.score_tally import ScoreTally, fault
from cluster.driver.scorer_outages import ScorerOutages
from cluster.runtime.pool import ActorPool
from configs.prompts import Prompt
from configs.rewards import Rewards
from configs.sections import Model
from records.errors import InputsLost, RunFailed
from rewards.combine import Combination

Labels = tuple[str, ...]
TOLERANCE = 0.5
"""Largest difference of a repeated score, in standard deviations of the batch.

A batch in another order rounds differently, while answers in a wrong order differ by more than one.
"""


def disagreement(first: Floats, again: Floats) -> float:
    """Return the largest |first - again| of scores float32 [B], in standard deviations of first.

    Scores that are NaN either time are left out. If the standard deviation is zero, the unit is a
    thousandth of the largest absolute score.
    """
    both = np.isfinite(first) & np.isfinite(again)
    if not both.any():
        return 0.0
    a, b = first[both].astype(np.float64), again[both].astype(np.float64)
    scale = float(a.std()) or 1e-3 * max(float(np.abs(a).max()), 1e-3)
    return float(np.abs(a - b).max()) / scale


@dataclass(frozen=True)
class RewardService:
    """The pools that score: one for the scorers that share actors, one for each of the others.

    ``groups``: by kind, a pool and the labels of the scorers that its actors hold. ``model``: the
    model whose images are scored; None if no prompt has a source image. ``outages``: waits for
    scorers whose server cannot be reached; None: their images count as failed.
    """

    groups: Mapping[str, tuple[ActorPool, Labels]]
    model: Model | None = None
    outages: ScorerOutages | None = None

    def scorer_inputs(self, prompts: Sequence[Prompt]) -> tuple[list[str], list[Metadata]]:
        """Return (texts, metadata) of prompts for scorers; source images are read once each."""
        first, count = prompts[0], len(prompts)
        if prompts.count(first) == count:  # true for nearly all of thousands of batches
            return [first.text] * count, [self._metadata(first)] * count
        different = {id(prompt): prompt for prompt in prompts}
        metadata = {which: self._metadata(prompt) for which, prompt in different.items()}
        return [prompt.text for prompt in prompts], [metadata[id(prompt)] for prompt in prompts]

    def _metadata(self, prompt: Prompt) -> Metadata:
        return prompt.metadata if self.model is None else prompt.scorer_metadata(self.model)

    @property
    def pools(self) -> list[ActorPool]:
        """Every pool of the service."""
        return [pool for pool, _ in self.groups.values()]


@dataclass(frozen=True)
class Scored:
    """Raw scores float32 [B] by scorer label."""

    values: dict[str, Floats]
    combination: Combination

    @cached_property
    def rewards(self) -> Floats:
        """Combined rewards float32 [B] (NaN: dropped).

        Computed on first use: parts are concatenated first, and only the whole is combined.
        """
        return self.combination(self.values)

    @staticmethod
    def concatenate(parts: Sequence[Scored]) -> Scored:
        """Concatenate the scores of one prompt's candidates, so that rewards are computed from all.

        A normalization is over all candidates of the prompt.
        """
        if len(parts) == 1:
            return parts[0]
        labels = parts[0].values
        values = {label: np.concatenate([part.values[label] for part in parts]) for label in labels}
        return Scored(values, parts[0].combination)


class Scoring:
    """The scoring of one iteration or evaluation.

    An evaluation also uses held-out scorers, combines scores without normalization, and takes known
    scores from the actors' cache.
    """

    def __init__(
        self,
        rewards: Rewards,
        service: RewardService,
        evaluation: bool = False,
        recheck: bool = False,
    ):
        """``recheck``: score the first batch twice, and require the same scores again."""
        self._rewards, self._service, self._evaluation = rewards, service, evaluation
        self._recheck = recheck and rewards.deterministic
        self.combination = Combination.from_config(rewards)
        if evaluation:
            self.combination = self.combination.for_evaluation
        scorers = rewards.all_scorers if evaluation else rewards.scorers
        self._labels = tuple(scorer.label for scorer in scorers if scorer.per == "image")
        # scorers that compare a prompt's images with each other; an evaluation does not use them
        self._comparing = tuple(
            scorer.label for scorer in scorers if scorer.per == "prompt" and not evaluation
        )
        requested = {*self._labels, *self._comparing}
        optional = {scorer.label for scorer in scorers if not scorer.required}
        self._awaited = requested - optional if service.outages is not None else set[str]()
        self.tally = ScoreTally(self.combination, requested, rewards.max_failed_share)

    async def score(
        self,
        key: object,
        images: ObjectRef[Images],
        prompts: list[Prompt],
        priority: tuple[int, ...],
    ) -> Scored:
        """Score B images, with one prompt each, with the scorers that look at single images.

        ``combine`` calls the scorers that compare a prompt's images. Raises InputsLost if the
        images are lost.
        """
        task = Task(("score", key), priority, self._fault, self._rewards.attempts)

        def ask(client: RewardClient, labels: Labels) -> Awaitable[Scores]:
            texts, metadata = self._service.scorer_inputs(prompts)
            return client.score(task, images, texts, metadata, labels, self._evaluation)

        values = await self._score_with(self._labels, ask, len(prompts))
        # without the scorers that compare images, whose scores ``combine`` adds
        combination = self.combination.uncompared if self._comparing else self.combination
        scored = Scored(values, combination)
        if not self._comparing:
            self.tally.scored(scored.values, len(prompts))
        if self._recheck:
            # reset before the await: other batches are scored meanwhile, and one check is enough
            self._recheck = False
            await self._score_again(key, images, prompts, values)
        return scored

    async def combine(
        self,
        key: object,
        parts: Sequence[Scored],
        images: Sequence[ObjectRef[Images]],
        prompt: Prompt,
        priority: tuple[int, ...],
    ) -> Scored:
        """Combine the scores of all images of a prompt, which were scored in ``parts``.

        ``images`` has one reference per part. Scorers that compare a prompt's images are called
        now, on all of them at once. Raises InputsLost if images are lost.
        """
        if not self._comparing:
            return Scored.concatenate(parts)
        task = Task(("compare", key), priority, self._fault, self._rewards.attempts)
        (metadata,) = self._service.scorer_inputs([prompt])[1]

        def ask(client: RewardClient, labels: Labels) -> Awaitable[Scores]:
            return client.compare(task, prompt.text, metadata, labels, images)

        known = Scored.concatenate(parts).values
        count = len(next(iter(known.values())))
        values = known | await self._score_with(self._comparing, ask, count)
        scored = Scored(values, self.combination)
        self.tally.scored(scored.values, count)
        return scored

    @property
    def compares(self) -> bool:
        """True if ``combine`` needs the images, for scorers that compare them."""
        return bool(self._comparing)

    async def _score_with(
        self, labels: Labels, ask: Callable[[RewardClient, Labels], Awaitable[Scores]], count: int
    ) -> dict[str, Floats]:
        """Return raw scores float32 [count] of ``labels``, from the pools that hold them."""
        calls = [
            self._score_in_pool(pool, pool_labels, ask, count)
            for pool, held in self._service.groups.values()
            if (pool_labels := tuple(label for label in held if label in labels))
        ]
        if len(calls) == 1:  # the usual case, which needs no task of its own
            return self._record(labels, [await calls[0]])
        # all have ended before an error is raised: no call continues in the background
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        # lost images can be generated again, so an error that ends the run is raised first
        for error in sorted(errors, key=lambda error: isinstance(error, InputsLost)):
            raise error
        answers = [outcome for outcome in outcomes if isinstance(outcome, Scores)]
        return self._record(labels, answers)

    def _record(self, labels: Labels, answers: Sequence[Scores]) -> dict[str, Floats]:
        self.tally.answered(answers)
        by_label = {label: values for answer in answers for label, values in answer.values.items()}
        return {label: by_label[label] for label in labels}

    async def _score_again(
        self,
        key: object,
        images: ObjectRef[Images],
        prompts: list[Prompt],
        first: Mapping[str, Floats],
    ) -> None:
        """Score the images again. Raises RunFailed if any scores differ from the ``first`` ones."""
        texts, metadata = self._service.scorer_inputs(prompts)
        for pool, labels in self._service.groups.values():
            pool_labels = tuple(label for label in labels if label in self._labels)
            if not pool_labels:
                continue
            client = RewardClient(pool)
            again = (await client.recheck(key, images, texts, metadata, pool_labels)).values
            for label in pool_labels:
                error = disagreement(first[label], again[label])
                self.tally.error = max(self.tally.error or 0.0, error)
                if error > TOLERANCE:
                    raise RunFailed(
                        f"scorer {label!r} gave the same {len(texts)} images different scores when"
                        f" they were scored again in reverse order: up to {error:.2g} standard"
                        " deviations apart; it may score other images, in another order, from an"
                        " earlier batch, or at random: fix it, or set rewards.deterministic ="
                        " false"
                    )

    async def _score_in_pool(
        self,
        pool: ActorPool,
        labels: Labels,
        ask: Callable[[RewardClient, Labels], Awaitable[Scores]],
        count: int,
    ) -> Scores:
        """Return one pool's scores, after waiting for servers that cannot be reached.

        Raises RunFailed if one cannot be reached for too long.
        """
        while True:
            scores = await self._attempt_in_pool(pool, labels, ask, count)
            lost = self._lost(scores)
            if (outages := self._service.outages) is None:
                return scores
            for label, values in scores.values.items():
                if np.isfinite(values).any():
                    outages.reached(label)
            if not lost:
                return scores
            await outages.wait(*next(iter(lost.items())))

    def _lost(self, scores: Scores) -> dict[str, str]:
        """Return the scorers to wait for, with the line of their error."""
        return {label: why for label, why in scores.unreachable.items() if label in self._awaited}

    def _fault(self, scores: Scores) -> str | None:
        """Return the failures for which an answer is retried at once, or None."""
        lost = self._lost(scores).values()
        return fault(tuple(line for line in scores.failures if line not in lost))

    async def _attempt_in_pool(
        self,
        pool: ActorPool,
        labels: Labels,
        ask: Callable[[RewardClient, Labels], Awaitable[Scores]],
        count: int,
    ) -> Scores:
        """Return one pool's scores.

        If every actor that took the task died or was silent, the scores are NaN and counted like
        those of a scorer that raised, unless no actor of the pool is alive.
        """
        try:
            return await ask(RewardClient(pool), labels)
        except RunFailed as error:
            # with no actor left every further batch would be dropped as well
            if not pool.alive:
                raise
            missing = np.full(count, np.nan, np.float32)
            return Scores(dict.fromkeys(labels, missing), (str(error),))
