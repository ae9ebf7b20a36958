"""The work of the ring in a single process without Ray: the same classes, called sequentially."""

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
from policy.types import Conditioning
from rewards.combine import combine

if TYPE_CHECKING:
    from ray import ObjectRef

X = TypeVar("X")


class SingleProcessLoop:
    """A training loop like that of a script, for arms that train on regenerated images.

    Its results are bit-identical to those of the ring. With ``together``, which requires an arm
    without exploration, the images of all prompts are one batch, as in other trainers; sums then
    run in another order. Raises ValueError for other arms.
    """

    def __init__(
        self, config: RunConfig, prompts: list[Prompt], directory: str, together: bool = False
    ):
        if not config.plan.regenerate or (together and config.plan.explore is not None):
            arm = "diffusionnft" if together else "sol_rl"
            raise ValueError(
                f"arm {config.arm!r} is not supported by the plain loop: use arm {arm!r}"
            )
        if together:
            size = config.prompts.per_iteration * config.selection.keep
            one_batch = config.regenerate.model_copy(update={"batch_size": size})
            config = config.model_copy(update={"regenerate": one_batch})
        self.config, self.plan, self.prompts = config, config.plan.explore, prompts
        self.together = together
        tree = config.model_dump(mode="json")
        self.encoder = EncoderActor(tree)
        self.reward = RewardActor(tree)
        self.selector = SelectorActor(tree)
        self.rollout = RolloutActor(tree) if self.plan else None
        self.learner = LearnerActor(tree, directory, _dereferenced)
        self.checksum = ""
        self.publish(0)

    def iteration(self, index: int) -> None:
        """Do the same work as ``cluster.driver.loop.Ring.iteration`` for this index."""
        rows = prompts_of_iteration(
            len(self.prompts), self.config.prompts.per_iteration, index, self.config.seed
        )
        prompts = [self.prompts[row] for row in rows]
        _, *conditioning = self.encoder.encode([[prompt.text] for prompt in prompts])
        groups = (
            self._groups(index, prompts, conditioning)
            if self.together
            else [self._group(index, p, prompts[p], cond) for p, cond in enumerate(conditioning)]
        )
        self.learner.update(share(index, groups, 1, "prompts")[0], all_rewards(groups))
        self.publish(index + 1)

    def publish(self, version: int) -> None:
        """Pack the sampling policy and load it into the rollout actor, if there is one."""
        if self.rollout is None:
            return
        manifest = self.learner.export(version).manifest
        shards = [self.learner.shard(i)[1] for i in range(len(manifest.shard_sizes))]
        self.checksum = self.rollout.load(None, manifest, range(len(shards)), *shards).checksum

    def _group(self, index: int, p: int, prompt: Prompt, cond: Any) -> TrainingGroup:
        seeds = self._seeds(index, p)
        start = shared_start(self.config, seeds)
        selected = self._chosen(index, p, seeds, start, prompt, cond) if self.plan else seeds
        images, samples = self._generate(selected, start, cond)
        rows = SampleRows(samples, tuple(range(len(selected))))
        return TrainingGroup(p, self._score(images, [prompt] * len(images)), cond, (rows,))

    def _groups(
        self, index: int, prompts: list[Prompt], conditioning: list[Any]
    ) -> list[TrainingGroup]:
        """Return the groups of all prompts, generated and scored as one batch."""
        seeds = [self._seeds(index, p) for p in range(len(prompts))]
        all_seeds = tuple(seed for own in seeds for seed in own)
        images, samples = self._generate(all_seeds, None, Conditioning.cat(conditioning))
        prompt_of_image = [prompt for prompt, own in zip(prompts, seeds, strict=True) for _ in own]
        rewards, count = self._score(images, prompt_of_image), len(seeds[0])
        parts = [range(p * count, (p + 1) * count) for p in range(len(prompts))]
        return [
            TrainingGroup(p, rewards[part], conditioning[p], (SampleRows(samples, tuple(part)),))
            for p, part in enumerate(parts)
        ]

    def _seeds(self, index: int, p: int) -> tuple[int, ...]:
        count = self.plan.pool_size if self.plan else self.config.selection.keep
        return tuple(stream_seed(self.config.seed, "explore", index, p, n) for n in range(count))

    def _chosen(
        self,
        index: int,
        p: int,
        seeds: tuple[int, ...],
        start: int | None,
        prompt: Prompt,
        cond: Any,
    ) -> tuple[int, ...]:
        """Return the seeds selected by their proxy images."""
        plan, size = self.plan, self.config.explore.chunk_size
        assert plan is not None and self.rollout is not None
        proxies = []
        for number, first in enumerate(range(0, len(seeds), size)):
            part, key = seeds[first : first + size], ChunkKey(index, p, number, index)
            request = ExploreChunk(key, part, plan.steps, plan.solver, False, start)
            _, images, _ = self.rollout.explore(request, cond)
            proxies.append(self._score(images, [prompt] * len(images)))
        chosen = self.selector.select(index, p, np.concatenate(proxies)).train
        return tuple(seeds[i] for i in chosen)

    def _generate(
        self, seeds: tuple[int, ...], start: int | None, cond: Any
    ) -> tuple[np.ndarray, Any]:
        """Generate images; return them and the samples themselves instead of a reference."""
        settings, solver = self.config.regenerate, self.config.plan.solver
        request = GenerateRequest(seeds, settings.steps, solver, start=start)
        _, images, samples = self.learner.generate(request, cond)
        return images, samples

    def _score(self, images: np.ndarray, prompts: list[Prompt]) -> np.ndarray:
        texts, metadata = [p.text for p in prompts], [p.metadata for p in prompts]
        scores = self.reward.score(images, texts, metadata)
        if scores.failures:
            raise RuntimeError(
                f"a scorer failed, so the loops did not do the same work: {scores.failures[0]}"
            )
        return combine(
            scores.values, {scorer.label: scorer.weight for scorer in self.config.rewards.scorers}
        )


def _dereferenced(references: Sequence[ObjectRef[X]], /) -> list[X]:
    """Return the objects themselves, which replace Ray's references here."""
    return cast("list[X]", list(references))
