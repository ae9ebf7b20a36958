"""Assignment of an iteration's samples to optimizer steps, and the waiting time it causes.

Replicas synchronize after every step, so a step takes as long as its busiest replica.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from configs.training import Optimizer

TRIED = 8
"""Number of random assignments that ``Dealing.waiting`` averages over."""


@dataclass(frozen=True)
class Dealing:
    """Assignment of samples to optimizer steps, evenly or at random (``Optimizer.deal``)."""

    steps: int = 1
    even: bool = False

    @classmethod
    def of(cls, settings: Optimizer) -> Dealing:
        """Return the assignment that is configured."""
        return cls(settings.steps_per_iteration, settings.deal == "even")

    def steps_of(self, total: int, seed: int) -> np.ndarray:
        """Return the optimizer step of each sample of an iteration: int [total], counted from 0.

        The sizes of the steps differ by at most one sample. If ``even``, every run of ``steps``
        consecutive samples goes to different steps, so that the number of samples of each prompt
        and of each replica differs by at most two between steps.
        """
        steps = min(self.steps, total)
        if steps <= 1:
            return np.zeros(total, np.int64)
        rng = np.random.Generator(np.random.Philox(key=seed))
        if self.even:
            rows = np.tile(np.arange(steps), (-(-total // steps), 1))
            return rng.permuted(rows, axis=1).reshape(-1)[:total]
        # samples are sorted by prompt: without the shuffle a step would see only some prompts
        order, assigned = rng.permutation(total), np.empty(total, np.int64)
        for step, part in enumerate(np.array_split(order, steps)):
            assigned[part] = step
        return assigned

    def busiest(self, owners: np.ndarray, seed: int) -> int:
        """Return the duration of an update in samples: the sum over steps of the busiest replica.

        All replicas wait for each other after every step. ``owners``: the replica of each sample,
        int [total].
        """
        dealt = self.steps_of(len(owners), seed)
        counts = np.zeros((int(dealt.max()) + 1, int(owners.max()) + 1), np.int64)
        np.add.at(counts, (dealt, owners), 1)
        return int(counts.max(axis=1).sum())

    def waiting(self, owners: np.ndarray) -> float:
        """Return the ratio of an update's duration to the busiest replica's computing time.

        It is the mean over ``TRIED`` seeds. ``owners`` as in ``busiest``.
        """
        mean = sum(self.busiest(owners, seed) for seed in range(TRIED)) / TRIED
        return mean / int(np.bincount(owners).max())
