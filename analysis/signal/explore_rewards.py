"""Rewards of explored images, computed once for all objectives and cached in a file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from analysis.measuring import (
    Say,
    choose_prompts,
    encode_prompts,
    explore_images,
    load_explorer,
    load_trainer,
    rewards_of,
)
from analysis.signal.files import EXPLORED, digest, read
from configs.prompts import Prompt
from configs.schema import RunConfig
from policy.explorer import Explorer
from policy.precision.backends import Backend
from policy.sampling.noise import stream_seed
from policy.types import Conditioning
from records.atomic import write_json
from records.rundir import output_errors
from rewards.combine import WeightedScorer


@dataclass(frozen=True)
class Batch:
    """Prompts of one iteration, with their conditioning."""

    index: int
    prompts: list[Prompt]
    conditioning: list[Conditioning]


def batches_of(config: RunConfig, prompts: int, batches: int) -> list[Batch]:
    """Return the first ``batches`` iterations of a run with ``prompts`` prompts each.

    Raises ConfigError if the prompts are too few or cannot be used with the model.
    """
    chosen = [choose_prompts(config, prompts, index) for index in range(batches)]
    rows = iter(encode_prompts(config, [prompt for part in chosen for prompt in part]))
    return [Batch(index, part, [next(rows) for _ in part]) for index, part in enumerate(chosen)]


def seeds_of(config: RunConfig, batch: Batch, p: int, count: int) -> list[int]:
    """Return the first ``count`` seeds that a run explores for prompt ``p`` of a batch."""
    return [stream_seed(config.seed, "explore", batch.index, p, n) for n in range(count)]


class ExploreRewards:
    """Rewards of the first ``pool`` seeds of every prompt, by backend and steps.

    With ``explore.paths`` they also depend on the objective.
    """

    def __init__(
        self,
        config: RunConfig,
        found: Sequence[Backend],
        batches: Sequence[Batch],
        pool: int,
        out: Path,
        say: Say,
    ) -> None:
        self.config, self.batches, self.pool, self.out, self.say = config, batches, pool, out, say
        self.scorer = WeightedScorer.from_config(config.rewards)
        self._backends = {backend.name: backend for backend in found}
        self._explorers: dict[str, Explorer] = {}
        self._rewards: dict[str, list[np.ndarray]] = {}

    def score(self, images: np.ndarray, prompt: Prompt) -> np.ndarray:
        """Return the rewards, float32 [B], of images of one prompt."""
        return rewards_of(self.scorer, self.config, images, prompt)

    def rewards(self, config: RunConfig, name: str, steps: int) -> list[np.ndarray]:
        """Return the rewards [P, pool] of each batch, using those stored in ``out`` if possible.

        ``config`` is the configuration with the objective. Raises ConfigError if its paths cannot
        be explored in ``steps`` steps.
        """
        key = self._digest(config, name, steps)
        if key not in self._rewards:
            self._rewards[key] = self._complete(config, key, name, steps)
        return self._rewards[key]

    def _complete(self, config: RunConfig, key: str, name: str, steps: int) -> list[np.ndarray]:
        stored = read(self.out / EXPLORED).get(key, [])[: len(self.batches)]
        rewards = [np.array(part, np.float32) for part in stored]
        start = time.perf_counter()
        for batch in self.batches[len(rewards) :]:
            rewards.append(self._explore(config, name, steps, batch))
            rows = {key: [part.tolist() for part in rewards]}
            with output_errors(self.out):
                write_json(self.out / EXPLORED, read(self.out / EXPLORED) | rows)
        self.say(f"explored with {name}, {steps} steps: {time.perf_counter() - start:.0f} s")
        return rewards

    def _digest(self, config: RunConfig, name: str, steps: int) -> str:
        parts = {"model", "prompts", "explore", "regenerate", "guidance", "rewards", "seed"}
        if config.explore.paths:
            parts.add("objective")
        tree = config.model_dump(mode="json", include=parts)
        return digest([tree, name, steps, len(self.batches[0].prompts), self.pool])

    def _explore(self, config: RunConfig, name: str, steps: int, batch: Batch) -> np.ndarray:
        if name not in self._explorers:
            trainer = load_trainer(self.config)
            self._explorers[name] = load_explorer(self.config, trainer, self._backends[name])
        rows = []
        for p, prompt in enumerate(batch.prompts):
            seeds = seeds_of(self.config, batch, p, self.pool)
            images = explore_images(
                self._explorers[name], config, batch.conditioning[p], seeds, steps
            )
            rows.append(self.score(images, prompt))
        return np.stack(rows)
