"""The ring's work in one plain process: the very same classes, called one after another, without
Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from actors.encoder import EncoderActor
from actors.learner import LearnerActor
from actors.messages import ChunkKey, ExploreChunk, GenerateRequest, SampleRows, TrainingGroup
from actors.reward import RewardActor
from actors.rollout import RolloutActor
from actors.selector import SelectorActor
from actors.sharing import all_rewards, share
from configs.prompts import Prompt, prompts_of_iteration
from configs.schema import RunConfig
from policy.sampling.noise import stream_seed
from policy.sampling.paths import shared_start
from rewards.combine import combine

if TYPE_CHECKING:
    from ray import ObjectRef

X = TypeVar("X")


class PlainLoop:
    """A training loop as a script would have it, for arms with two stages. Same numbers as the
    ring, bit for bit.
    """

    def __init__(self, config: RunConfig, prompts: list[Prompt], failure_dir: str):
        if config.plan.explore is None or not config.plan.regenerate:
            raise ValueError(
                f"arm {config.arm!r}: the plain loop explores and regenerates, use arm 'sol_rl'"
            )
        self.config, self.plan, self.prompts = config, config.plan.explore, prompts
        tree = config.model_dump(mode="json")
        self.encoder = EncoderActor(tree)
        self.reward = RewardActor(tree)
        self.selector = SelectorActor(tree)
        self.rollout, self.learner = RolloutActor(tree), LearnerActor(tree, failure_dir, _as_given)
        self.checksum = ""
        self.publish(0)

    def iteration(self, index: int) -> None:
        """Everything that ``cluster.driver.loop.Ring.iteration`` does for the same index."""
        rows = prompts_of_iteration(
            len(self.prompts), self.config.prompts.per_iteration, index, self.config.seed
        )
        _, *conditioning = self.encoder.encode([[self.prompts[row].text] for row in rows])
        groups = [
            self._group(index, p, self.prompts[row], conditioning[p]) for p, row in enumerate(rows)
        ]
        self.learner.update(share(index, groups, 1, "prompts")[0], all_rewards(groups))
        self.publish(index + 1)

    def publish(self, version: int) -> None:
        """Pack the sampling policy and load it into the explorer."""
        manifest = self.learner.export(version).manifest
        shards = [self.learner.shard(i)[1] for i in range(len(manifest.shard_sizes))]
        self.checksum = self.rollout.load(None, manifest, range(len(shards)), *shards).checksum

    def _group(self, index: int, p: int, prompt: Prompt, cond: Any) -> TrainingGroup:
        config, size = self.config, self.config.explore.chunk_size
        seeds = tuple(
            stream_seed(config.seed, "explore", index, p, n) for n in range(self.plan.pool_size)
        )
        start = shared_start(config, seeds)
        proxies = []
        for number, first in enumerate(range(0, len(seeds), size)):
            part = seeds[first : first + size]
            request = ExploreChunk(
                ChunkKey(index, p, number, index),
                part,
                self.plan.steps,
                self.plan.solver,
                False,
                start,
            )
            _, images, _ = self.rollout.explore(request, cond)
            proxies.append(self._score(images, prompt))
        chosen = self.selector.select(index, p, np.concatenate(proxies)).train
        full = config.regenerate
        again = tuple(seeds[i] for i in chosen)
        request = GenerateRequest(again, full.steps, config.plan.solver, start=start)
        _, images, made = self.learner.generate(request, cond)
        samples: Any = made  # in place of a reference to them, which ``fetch=list`` leaves alone
        rows = SampleRows(samples, tuple(range(len(chosen))))
        return TrainingGroup(p, self._score(images, prompt), cond, (rows,))

    def _score(self, images: np.ndarray, prompt: Prompt) -> np.ndarray:
        scores = self.reward.score(
            images, [prompt.text] * len(images), [prompt.metadata] * len(images)
        )
        if scores.failures:
            raise RuntimeError(
                f"a scorer failed, so the loops' work is not the same: {scores.failures[0]}"
            )
        return combine(
            scores.values, {scorer.label: scorer.weight for scorer in self.config.rewards.scorers}
        )


def _as_given(references: Sequence[ObjectRef[X]], /) -> list[X]:
    """Without Ray a "reference" is the object itself."""
    return cast("list[X]", list(references))
