"""One client per service: what may be asked of it, how the task is named, and what comes back.

The way of a seed: ``RolloutClient.explore`` -> ``RewardClient.score`` -> ``SelectorClient.select``
-> ``LearnerClient.generate`` -> ``RewardClient.score`` -> ``LearnerClient.update``. The way of the
weights: ``LearnerClient.export``, ``.shard`` -> ``RolloutActor.load``, which every member of the
pool is told by itself (``cluster.driver.weights``).
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
    Chosen,
    ExploreChunk,
    Explored,
    Exported,
    Floats,
    Generated,
    GenerateRequest,
    Images,
    Metadata,
    Probe,
    Probed,
    Scores,
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
    """Prompts to conditioning, with the images that they edit as ``model`` draws."""

    pool: Caller
    model: Model

    async def encode(
        self, what: int | str, groups: list[list[Prompt]]
    ) -> list[ObjectRef[Conditioning]]:
        """A reference per group of prompts, to as many rows. ``what``: an iteration, or a word.

        Raises OSError for an image that is not there any more.
        """
        texts = [[prompt.text for prompt in group] for group in groups]
        if not any(prompt.image for group in groups for prompt in group):
            task, returns = Task[float](("encode", what)), 1 + len(groups)
            _, *found = await self.pool.call_parts(task, returns, EncoderActor.encode, texts)
            return found
        found: list[ObjectRef[Conditioning]] = []
        # one after the other: images of many prompts at once would fill the driver's memory
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
    """Seeds to proxy images."""

    pool: Caller

    async def explore(
        self,
        request: ExploreChunk,
        conditioning: ObjectRef[Conditioning],
        priority: tuple[int, ...] = (),
    ) -> Explored:
        """Images of one prompt's seeds by the version that ``request`` names."""
        task: Task[float] = Task(request.key, priority)  # ``Task[float](...)`` takes thrice as long
        _, images, samples = await self.pool.call_parts(
            task, 3, RolloutActor.explore, request, resolved(conditioning)
        )
        return Explored(images, samples)


@dataclass(frozen=True)
class RewardClient:
    """Images to raw scores, by the scorers that share a pool."""

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
        """Raw scores of B images, one prompt each; the arguments are those of the actor."""
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
        """Raw scores of all images of a prompt, by scorers that compare them."""
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
        """The raw scores of the same B images, asked for in reverse."""
        task = Task[Scores](("rescore", key))
        return await self.pool.call(
            task, RewardActor.recheck, resolved(images), prompts, metadata, labels
        )


@dataclass(frozen=True)
class SelectorClient:
    """Rewards to the seeds that are trained on."""

    pool: Caller

    async def select(self, iteration: int, prompt: int, rewards: Floats) -> Chosen:
        """What to train on and what to audit of a prompt with proxy rewards float32 [N]."""
        task: Task[Chosen] = Task(("select", iteration, prompt), (iteration, prompt))
        return await self.pool.call(task, SelectorActor.select, iteration, prompt, rewards)


@dataclass(frozen=True)
class LearnerClient:
    """The one service with a state, of one replica or several that are equal between two calls.

    So ``any_replica`` generates, an update or a checkpoint goes to ``every_replica``, and the rest
    is asked of the ``first``, but for an export where no replica has whole weights.
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
        """Images and samples in full precision."""
        task: Task[float] = Task(key, priority)
        _, images, samples = await self.any_replica.call_parts(
            task, 3, LearnerActor.generate, request, resolved(conditioning)
        )
        return Generated(images, samples)

    async def update(self, iteration: int, groups: list[TrainingGroup]) -> dict[str, float]:
        """One update on all groups; metrics by name. Each replica is sent what it trains on, and
        the rewards of all.
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
        asked = self.first if self.sharding == "none" else self.every_replica
        return await asked.call(task, LearnerActor.export, version, backend, weights)

    async def shard(self, version: int, index: int) -> ObjectRef[Shard]:
        """One shard of the last export. The caller owns it, so it outlives the learner."""
        task = Task[int](("shard", version, index))
        _, shard = await self.first.call_parts(task, 2, LearnerActor.shard, index)
        return shard

    async def probe(self, request: Probe, conditioning: ObjectRef[Conditioning]) -> Probed:
        """Latents of a few seeds by the last export."""
        task = Task[Probed](("probe", request.version))
        return await self.first.call(task, LearnerActor.probe, request, resolved(conditioning))

    async def quantization(self) -> list[dict[str, object]]:
        """Rows of ``quantization.json``."""
        task = Task[list[dict[str, object]]](("quantization",))
        return await self.first.call(task, LearnerActor.quantization)

    async def save(self, iteration: int, path: str, extra: Mapping[str, object]) -> None:
        """Write a checkpoint, with ``extra`` state of the driver's."""
        await self.first.call(Task[None](("save", iteration)), LearnerActor.save, path, extra)

    async def load(self, name: str, path: str) -> None:
        """Restore a checkpoint."""
        task = Task[Mapping[str, object]](("load", name))
        await self.every_replica.call(task, LearnerActor.load, path)
