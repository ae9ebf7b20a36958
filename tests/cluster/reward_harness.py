"""A reward service of real pools and actors, which scores four images of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from actors.reward import RewardActor
from cluster.driver.scoring import RewardService, Scored, Scoring
from cluster.runtime.pool import ActorPool
from configs.load import parse
from configs.prompts import Prompt
from configs.rewards import Rewards
from configs.schema import RunConfig
from tests.cluster.hosts import Kept

# means 0, 1, 2, 3
IMAGES = np.arange(4, dtype=np.uint8)[:, None, None, None].repeat(3, 1).repeat(8, 2).repeat(8, 3)
PROMPTS = [Prompt("one"), Prompt("one"), Prompt("two"), Prompt("two", {"n": 2})]


def misbehaves(kind: str, alias: str = "", **more: Any) -> dict[str, Any]:
    """Return a scorer of ``tests.cluster.scorers``: the mean of an image, except as ``kind``
    says.
    """
    settings = {"kind": kind, **more.pop("settings", {})}
    return {
        "name": "tests.cluster.scorers:Misbehaves",
        "alias": alias or kind.replace(" ", "_"),
        "settings": settings,
        **more,
    }


MEAN = misbehaves("never", "mean")
JPEG = {"name": "jpeg_compressibility", "weight": 0.5}


def config(
    scorers: Sequence[dict[str, Any]], service: dict[str, Any] | None = None, **more: Any
) -> RunConfig:
    """Return a configuration: two actors share the scorers, and ``own`` has the services of the
    others.
    """
    quick = {"actors": 2, "cpus": 0.1, "deadline_s": 2.0, "max_attempts": 2}
    own = {label: quick | settings for label, settings in more.pop("own", {}).items()}
    return parse(
        {
            "name": "scoring",
            "model": {"path": "shapes", "height": 32, "width": 32},
            "prompts": {"train": "shapes/prompts/train.jsonl", "test": "shapes/prompts/test.jsonl"},
            "rewards": {"scorers": list(scorers), "attempts": 2, **more},
            "services": {"reward": quick | (service or {}), "scorers": own},
        }
    )


class Harness:
    """A reward service with an event loop that stays open."""

    def __init__(self, run: RunConfig):
        self.run, self.events, self.loop = run, [], asyncio.new_event_loop()
        plain = run.model_dump(mode="json")
        self.kept = Kept(RewardActor, num_cpus=0.1)
        groups = {}
        for kind in ("reward", *(f"scorers.{label}" for label in run.services.scorers)):
            event = lambda name, **facts: self.events.append(f"{name} {facts}")  # noqa: E731
            spawn = lambda name, kind=kind: self.kept.spawn(plain, kind)  # noqa: E731
            if labels := run.scorers_of(kind):
                groups[kind] = (ActorPool(kind, spawn, run.services.of(kind), event), labels)
        self.service = RewardService(groups)

    def __enter__(self) -> Harness:
        self.wait(*(pool.start() for pool in self.service.pools))
        return self

    def __exit__(self, *_: object) -> None:
        self.wait(self.kept.stop(*self.service.pools))
        self.loop.close()

    def wait(self, *work: Any) -> list[Any]:
        async def all_of_it() -> list[Any]:
            return list(await asyncio.gather(*work))

        return self.loop.run_until_complete(all_of_it())

    def score(
        self, rewards: Rewards | None = None, evaluation: bool = False
    ) -> tuple[Scored, Scoring]:
        """Score the four images, by the scorers of ``rewards`` or by all scorers of the actors."""
        scoring = Scoring(rewards or self.run.rewards, self.service, evaluation)
        (scored,) = self.wait(scoring.score("x", ray.put(IMAGES), PROMPTS, (0,)))
        return scored, scoring


def rewards_of(*scorers: dict[str, Any], **more: Any) -> Rewards:
    """Return ``[rewards]`` of these scorers, with two tries each."""
    return Rewards.model_validate({"scorers": scorers, "attempts": 2, **more})
