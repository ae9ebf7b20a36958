"""Scores of images that live in the object store, with retries; what is dropped is counted."""

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
from cluster.runtime.pool import ActorPool
from configs.prompts import Prompt
from configs.rewards import Rewards
from configs.sections import Model
from records.errors import InputsLost, RunFailed
from rewards.combine import Combination

Labels = tuple[str, ...]
TOLERANCE = 0.5
"""Standard deviations of a batch by which a score may differ when it is asked for again: batches in
another order round otherwise, and another order of answers is off by more than one.
"""


def disagreement(first: Floats, again: Floats) -> float:
    """Largest |first - again| of scores float32 [B] that are there both times, in standard
    deviations of the first; where that is zero, in thousandths of their size.
    """
    both = np.isfinite(first) & np.isfinite(again)
    if not both.any():
        return 0.0
    a, b = first[both].astype(np.float64), again[both].astype(np.float64)
    scale = float(a.std()) or 1e-3 * max(float(np.abs(a).max()), 1e-3)
    return float(np.abs(a - b).max()) / scale


@dataclass(frozen=True)
class RewardService:
    """The pools that score: one for the scorers that share actors, and one for each that has actors
    of its own. ``groups``: by kind, a pool and the labels of the scorers that its actors hold.
    ``model``: whose images are scored; None where no prompt has a source image.
    """

    groups: Mapping[str, tuple[ActorPool, Labels]]
    model: Model | None = None

    def told(self, prompts: Sequence[Prompt]) -> tuple[list[str], list[Metadata]]:
        """(texts, metadata) of prompts as scorers get them; a source image is read once."""
        first, count = prompts[0], len(prompts)
        if prompts.count(first) == count:  # as in nearly all of thousands of batches
            return [first.text] * count, [self._metadata(first)] * count
        different = {id(prompt): prompt for prompt in prompts}
        told = {which: self._metadata(prompt) for which, prompt in different.items()}
        return [prompt.text for prompt in prompts], [told[id(prompt)] for prompt in prompts]

    def _metadata(self, prompt: Prompt) -> Metadata:
        return prompt.metadata if self.model is None else prompt.told(self.model)

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
        """Combined, float32 [B] (NaN: dropped). Of parts nobody asks: their whole is combined."""
        return self.combination(self.values)

    @staticmethod
    def concatenate(parts: Sequence[Scored]) -> Scored:
        """Parts of one prompt's candidates, in order, combined anew: a normalization is over all of
        them.
        """
        if len(parts) == 1:
            return parts[0]
        labels = parts[0].values
        values = {label: np.concatenate([part.values[label] for part in parts]) for label in labels}
        return Scored(values, parts[0].combination)


class Scoring:
    """The scoring of one iteration or evaluation.

    An evaluation asks held-out scorers too, combines without normalization, and takes known scores
    from the actors' memory.
    """

    def __init__(
        self,
        rewards: Rewards,
        service: RewardService,
        evaluation: bool = False,
        recheck: bool = False,
    ):
        """``recheck``: the first batch is scored twice, and must get the same scores again."""
        self._rewards, self._service, self._evaluation = rewards, service, evaluation
        self._recheck = recheck and rewards.deterministic
        self.combination = Combination.from_config(rewards)
        if evaluation:
            self.combination = self.combination.for_evaluation
        scorers = rewards.everyone if evaluation else rewards.scorers
        self._labels = tuple(scorer.label for scorer in scorers if scorer.per == "image")
        # that score a prompt's images together; an evaluation has no use for them
        self._comparing = tuple(
            scorer.label for scorer in scorers if scorer.per == "prompt" and not evaluation
        )
        asked = {*self._labels, *self._comparing}
        self.tally = ScoreTally(self.combination, asked, rewards.max_failed_share)

    async def score(
        self,
        key: object,
        images: ObjectRef[Images],
        prompts: list[Prompt],
        priority: tuple[int, ...],
    ) -> Scored:
        """Rewards of B images, one prompt each; without what scorers say that compare a prompt's
        images, which ``together`` asks. Raises InputsLost when the images are gone.
        """
        task = Task(("score", key), priority, fault, self._rewards.attempts)

        def ask(client: RewardClient, labels: Labels) -> Awaitable[Scores]:
            texts, metadata = self._service.told(prompts)
            return client.score(task, images, texts, metadata, labels, self._evaluation)

        values = await self._ask_all(self._labels, ask, len(prompts))
        # of the scorers that look at one image; those that compare come in ``together``
        combination = self.combination.uncompared if self._comparing else self.combination
        scored = Scored(values, combination)
        if not self._comparing:
            self.tally.scored(scored.values, len(prompts))
        if self._recheck:
            # before the wait: other batches are scored meanwhile, and one is enough
            self._recheck = False
            await self._score_again(key, images, prompts, values)
        return scored

    async def together(
        self,
        key: object,
        parts: Sequence[Scored],
        images: Sequence[ObjectRef[Images]],
        prompt: Prompt,
        priority: tuple[int, ...],
    ) -> Scored:
        """All images of a prompt, scored in ``parts``: those of a part are at a reference each.

        Scorers that compare are asked now, about all at once. Raises InputsLost when images are
        gone.
        """
        if not self._comparing:
            return Scored.concatenate(parts)
        task = Task(("compare", key), priority, fault, self._rewards.attempts)
        (metadata,) = self._service.told([prompt])[1]

        def ask(client: RewardClient, labels: Labels) -> Awaitable[Scores]:
            return client.compare(task, prompt.text, metadata, labels, images)

        known = Scored.concatenate(parts).values
        count = len(next(iter(known.values())))
        values = known | await self._ask_all(self._comparing, ask, count)
        scored = Scored(values, self.combination)
        self.tally.scored(scored.values, count)
        return scored

    @property
    def compares(self) -> bool:
        """Whether ``together`` looks at the images."""
        return bool(self._comparing)

    async def _ask_all(
        self, labels: Labels, ask: Callable[[RewardClient, Labels], Awaitable[Scores]], count: int
    ) -> dict[str, Floats]:
        """Raw scores float32 [count] of ``labels``, asked of the pools that have them."""
        asked = [
            self._ask(pool, mine, ask, count)
            for pool, held in self._service.groups.values()
            if (mine := tuple(label for label in held if label in labels))
        ]
        if len(asked) == 1:  # as most often, and it needs no task of its own
            return self._given(labels, [await asked[0]])
        # all have ended before one error is raised: none goes on asking in the background
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        ends = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        # images can be made again: what ends the run comes first
        for end in sorted(ends, key=lambda end: isinstance(end, InputsLost)):
            raise end
        answers = [outcome for outcome in outcomes if isinstance(outcome, Scores)]
        return self._given(labels, answers)

    def _given(self, labels: Labels, answers: Sequence[Scores]) -> dict[str, Floats]:
        self.tally.answered(answers)
        given = {label: values for answer in answers for label, values in answer.values.items()}
        return {label: given[label] for label in labels}

    async def _score_again(
        self,
        key: object,
        images: ObjectRef[Images],
        prompts: list[Prompt],
        first: Mapping[str, Floats],
    ) -> None:
        """Raises RunFailed where a scorer gives these images other scores than at first."""
        texts, metadata = self._service.told(prompts)
        for pool, labels in self._service.groups.values():
            mine = tuple(label for label in labels if label in self._labels)
            if not mine:
                continue
            client = RewardClient(pool)
            again = (await client.recheck(key, images, texts, metadata, mine)).values
            for label in mine:
                error = disagreement(first[label], again[label])
                self.tally.error = max(self.tally.error or 0.0, error)
                if error > TOLERANCE:
                    raise RunFailed(
                        f"scorer {label!r} gave the same {len(texts)} images other scores when"
                        f" asked again in reverse: up to {error:.2g} standard deviations apart; it"
                        " answers for other images, in another order, for an earlier batch or at"
                        " random: fix it, or set rewards.deterministic = false"
                    )

    async def _ask(
        self,
        pool: ActorPool,
        labels: Labels,
        ask: Callable[[RewardClient, Labels], Awaitable[Scores]],
        count: int,
    ) -> Scores:
        """One pool's scores. Where every actor that took the task died of it or was silent, they
        are dropped and counted like those of a scorer that raised, unless the whole pool is gone.
        """
        try:
            return await ask(RewardClient(pool), labels)
        except RunFailed as end:
            # with nobody left to ask every further batch would be dropped as well
            if not pool.alive:
                raise
            missing = np.full(count, np.nan, np.float32)
            return Scores(dict.fromkeys(labels, missing), (str(end),))
