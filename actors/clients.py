"""Clients of the services: one class per service, with a typed method for each call.

A seed passes through ``RolloutClient.explore``, ``RewardClient.score``, ``SelectorClient.select``,
``LearnerClient.generate``, ``RewardClient.score`` and ``LearnerClient.update``. Weights pass
through ``LearnerClient.export`` and ``.shard`` to ``RolloutActor.load``, which
``cluster.driver.weights`` calls for each member of the pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ray import ObjectRef

from actors.calls import Caller, Task, resolved
from actors.encoder import EncoderActor
from actors.learner import LearnerActor
from actors.messages import (
    ExploreChunk,
    Explored,
    Exported,
    Floats,
    Generated,
    GenerateRequest,
    Images,
    Metadata,
    Probe,
    ProbeResult,
    Scores,
    SelectedSeeds,
    Shard,
    TrainingGroup,
)
from actors.reward import RewardActor
from actors.rollout import RolloutActor
from actors.selector import SelectorActor
from actors.sharing import all_rewards, share
from configs.prompts import Prompt
from configs.sections import Model
from configs.services import Sharding, Share
from policy.types import Conditioning


@dataclass(frozen=True)
class EncoderClient:
    """Client of the encoder: prompts, and the images that they edit, to conditioning."""

    pool: Caller
    model: Model

    async def encode(
        self, what: int | str, groups: list[list[Prompt]]
    ) -> list[ObjectRef[Conditioning]]:
        """Encode groups of prompts; return a reference per group to its rows of conditioning.

        ``what``, an iteration or a word, is part of the task's key. Raises OSError if the image of
        a prompt no longer exists.
        """
        texts = [[prompt.text for prompt in group] for group in groups]
        if not any(prompt.image for group in groups for prompt in group):
            task, returns = Task[float](("encode", what)), 1 + len(groups)
            _, *found = await self.pool.call_parts(task, returns, EncoderActor.encode, texts)
            return found
        found: list[ObjectRef[Conditioning]] = []
        # group by group: images of all prompts at once could exhaust the driver's memory
        for number, group in enumerate(groups):
            images = await asyncio.to_thread(self._images, group)
            task = Task[float](("encode", what, number))
            _, row = await self.pool.call_parts(
                task, 2, EncoderActor.encode, [texts[number]], [images]
            )
            found.append(row)
        return found

    def _images(self, group: list[Prompt]) -> list[Images]:
        sources = [prompt.source(self.model) for prompt in group]
        return [source for source in sources if source is not None]


@dataclass(frozen=True)
class RolloutClient:
    """Client of the rollout actors: seeds to proxy images."""

    pool: Caller

    async def explore(
        self,
        request: ExploreChunk,
        conditioning: ObjectRef[Conditioning],
        priority: tuple[int, ...] = (),
    ) -> Explored:
        """Generate images of one prompt's seeds with the policy version named in ``request``."""
        # annotated rather than Task[float | None](...), which takes four times as long
        task: Task[float | None] = Task(request.key, priority)
        saturated, images, samples = await self.pool.call_parts(
            task, 3, RolloutActor.explore, request, resolved(conditioning)
        )
        return Explored(images, samples, saturated)


@dataclass(frozen=True)
class RewardClient:
    """Client of the reward actors of one pool: images to raw scores."""

    pool: Caller

    async def score(
        self,
        task: Task[Scores],
        images: ObjectRef[Images],
        prompts: list[str],
        metadata: list[Metadata],
        labels: tuple[str, ...],
        cached: bool,
    ) -> Scores:
        """Score B images with one prompt each; the arguments are those of ``RewardActor.score``."""
        return await self.pool.call(
            task, RewardActor.score, resolved(images), prompts, metadata, labels, cached
        )

    async def compare(
        self,
        task: Task[Scores],
        prompt: str,
        metadata: Metadata,
        labels: tuple[str, ...],
        images: Sequence[ObjectRef[Images]],
    ) -> Scores:
        """Score all images of a prompt by scorers that compare them with each other."""
        parts = [resolved(part) for part in images]
        return await self.pool.call(task, RewardActor.compare, prompt, metadata, labels, *parts)

    async def recheck(
        self,
        key: object,
        images: ObjectRef[Images],
        prompts: list[str],
        metadata: list[Metadata],
        labels: tuple[str, ...],
    ) -> Scores:
        """Score the same B images again, in reverse order."""
        task = Task[Scores](("rescore", key))
        return await self.pool.call(
            task, RewardActor.recheck, resolved(images), prompts, metadata, labels
        )


@dataclass(frozen=True)
class SelectorClient:
    """Client of the selector: proxy rewards to the seeds that are trained on."""

    pool: Caller

    async def select(self, iteration: int, prompt: int, rewards: Floats) -> SelectedSeeds:
        """Select from a prompt's proxy rewards float32 [N] what to train on and what to audit."""
        task: Task[SelectedSeeds] = Task(("select", iteration, prompt), (iteration, prompt))
        return await self.pool.call(task, SelectorActor.select, iteration, prompt, rewards)


@dataclass(frozen=True)
class LearnerClient:
    """Client of the learner, the only service with state: one replica, or several in equal state.

    Any replica generates, every replica updates and loads checkpoints, and the first one does the
    rest. If the base is sharded, every replica takes part in an export too.
    """

    any_replica: Caller
    first: Caller
    every_replica: Caller
    by: Share = "prompts"
    sharding: Sharding = "none"

    async def generate(
        self,
        key: tuple[object, ...],
        request: GenerateRequest,
        conditioning: ObjectRef[Conditioning],
        priority: tuple[int, ...],
    ) -> Generated:
        """Generate images and samples in full precision."""
        task: Task[float] = Task(key, priority)
        _, images, samples = await self.any_replica.call_parts(
            task, 3, LearnerActor.generate, request, resolved(conditioning)
        )
        return Generated(images, samples)

    async def update(self, iteration: int, groups: list[TrainingGroup]) -> dict[str, float]:
        """Update the policy on all groups; return metrics by name.

        Each replica receives the samples that it trains on, and the rewards of all.
        """
        task = Task[dict[str, float]](("update", iteration))
        return await self.every_replica.call_each(
            task,
            LearnerActor.update,
            lambda size: share(iteration, groups, size, self.by),
            all_rewards(groups),
        )

    async def export(
        self, version: int, backend: str | None = None, weights: str | None = None
    ) -> Exported:
        """Pack the policy as ``version`` for rollout actors that run ``backend``."""
        task = Task[Exported](("export", version))
        replicas = self.first if self.sharding == "none" else self.every_replica
        return await replicas.call(task, LearnerActor.export, version, backend, weights)

    async def shard(self, version: int, index: int) -> ObjectRef[Shard]:
        """Fetch one shard of the last export. The caller owns it, so it outlives the learner."""
        task = Task[int](("shard", version, index))
        _, shard = await self.first.call_parts(task, 2, LearnerActor.shard, index)
        return shard

    async def probe(self, request: Probe, conditioning: ObjectRef[Conditioning]) -> ProbeResult:
        """Generate latents of a few seeds with the weights of the last export."""
        task = Task[ProbeResult](("probe", request.version))
        return await self.first.call(task, LearnerActor.probe, request, resolved(conditioning))

    async def quantization(self) -> list[dict[str, object]]:
        """Return the rows of ``quantization.json``."""
        task = Task[list[dict[str, object]]](("quantization",))
        return await self.first.call(task, LearnerActor.quantization)

    async def save(self, iteration: int, path: str, extra: Mapping[str, object]) -> None:
        """Write a checkpoint, including ``extra``, the state of the driver."""
        await self.first.call(Task[None](("save", iteration)), LearnerActor.save, path, extra)

    async def load(self, name: str, path: str) -> None:
        """Restore a checkpoint."""
        task = Task[Mapping[str, object]](("load", name))
        await self.every_replica.call(task, LearnerActor.load, path)
