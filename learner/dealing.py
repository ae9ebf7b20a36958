"""Which optimizer step of an iteration each sample goes to, and how long replicas wait for others
in them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from configs.training import Optimizer

TRIED = 8
"""Updates that a mean over random deals is taken of."""


@dataclass(frozen=True)
class Dealing:
    """To so many ``steps``; ``even`` or at random, see ``Optimizer.deal``."""

    steps: int = 1
    even: bool = False

    @classmethod
    def of(cls, settings: Optimizer) -> Dealing:
        """As configured."""
        return cls(settings.steps_per_iteration, settings.deal == "even")

    def steps_of(self, total: int, seed: int) -> np.ndarray:
        """The optimizer step, int [total] from 0, of each of an iteration's samples in their order.

        Steps have equal numbers of samples, to one. Even: each ``steps`` samples that follow each
        other go to different steps, so that each prompt and each replica has an equal number in
        every step too, to two.
        """
        steps = min(self.steps, total)
        if steps <= 1:
            return np.zeros(total, np.int64)
        rng = np.random.Generator(np.random.Philox(key=seed))
        if self.even:
            rows = np.tile(np.arange(steps), (-(-total // steps), 1))
            return rng.permuted(rows, axis=1).reshape(-1)[:total]
        # samples come by prompt: dealt in order, a step would see some of the prompts only
        order, found = rng.permutation(total), np.empty(total, np.int64)
        for step, part in enumerate(np.array_split(order, steps)):
            found[part] = step
        return found

    def busiest(self, owners: np.ndarray, seed: int) -> int:
        """Samples of each step's busiest replica, added up: what an update lasts, as all replicas
        wait for each other after every step. ``owners``: the replica, int [total], of each sample.
        """
        dealt = self.steps_of(len(owners), seed)
        counts = np.zeros((int(dealt.max()) + 1, int(owners.max()) + 1), np.int64)
        np.add.at(counts, (dealt, owners), 1)
        return int(counts.max(axis=1).sum())

    def waiting(self, owners: np.ndarray) -> float:
        """How many times longer an update lasts than its busiest replica computes: the mean of
        ``TRIED`` updates.
        """
        mean = sum(self.busiest(owners, seed) for seed in range(TRIED)) / TRIED
        return mean / int(np.bincount(owners).max())
