"""Assignment of an iteration's samples to its optimizer steps.

It determines how long replicas wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from configs.training import Optimizer

TRIED = 8
"""Number of updates over which random distributions are averaged."""


@dataclass(frozen=True)
class StepAssignment:
    """Distribution to ``steps`` optimizer steps: ``even`` or random, see ``Optimizer.deal``."""

    steps: int = 1
    even: bool = False

    @classmethod
    def of(cls, settings: Optimizer) -> StepAssignment:
        """Return the configured distribution."""
        return cls(settings.steps_per_iteration, settings.deal == "even")

    def assign(self, total: int, seed: int) -> np.ndarray:
        """Return the optimizer step, int [total] from 0, of each sample of an iteration.

        Sizes of steps differ by at most one sample. With ``even``, each ``steps`` consecutive
        samples go to different steps, so that also the numbers of samples of each prompt, and of
        each replica, differ by at most two between steps.
        """
        steps = min(self.steps, total)
        if steps <= 1:
            return np.zeros(total, np.int64)
        rng = np.random.Generator(np.random.Philox(key=seed))
        if self.even:
            rows = np.tile(np.arange(steps), (-(-total // steps), 1))
            return rng.permuted(rows, axis=1).reshape(-1)[:total]
        # samples are ordered by prompt: without a permutation a step would see only some prompts
        order, assigned = rng.permutation(total), np.empty(total, np.int64)
        for step, part in enumerate(np.array_split(order, steps)):
            assigned[part] = step
        return assigned

    def busiest(self, owners: np.ndarray, seed: int) -> int:
        """Return the sum over steps of the samples of the busiest replica.

        An update takes that long, because all replicas wait for each other after every step.
        ``owners`` has the replica, int [total], of each sample.
        """
        assigned = self.assign(len(owners), seed)
        counts = np.zeros((int(assigned.max()) + 1, int(owners.max()) + 1), np.int64)
        np.add.at(counts, (assigned, owners), 1)
        return int(counts.max(axis=1).sum())

    def slowdown(self, owners: np.ndarray) -> float:
        """Return the duration of an update relative to the computing time of its busiest replica.

        The mean over ``TRIED`` updates.
        """
        mean = sum(self.busiest(owners, seed) for seed in range(TRIED)) / TRIED
        return mean / int(np.bincount(owners).max())
