"""The share of signal in a gradient, by the cosine between gradients of independent batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learner.advantages import advantages
from learner.batch import Group, join_groups
from learner.trainer import Trainer


@dataclass(frozen=True)
class Cosine:
    """Mean cosine over all pairs of batches, with a jackknife standard error over batches."""

    mean: float
    stderr: float
    batches: int


def gradient(trainer: Trainer, batch: int, groups: Sequence[Group]) -> Tensor:
    """Return the gradient of one optimizer step on ``groups``: flat, float32 [D].

    Changes nothing. ``batch`` identifies the random streams like the number of an iteration. Raises
    NonFiniteTraining.
    """
    config = trainer.config
    values, _ = advantages([group.rewards for group in groups], config.resolved_advantages)
    of_prompt = {group.prompt_index: part for group, part in zip(groups, values, strict=True)}
    samples = join_groups(groups, of_prompt, config.seed, batch, trainer.device)
    return trainer.updater.gradient(samples, trainer.sigmas)


def mean_cosine(gradients: Sequence[Tensor]) -> Cosine:
    """Return the mean cosine between B >= 3 gradients [D] of independent batches.

    Each gradient g is the sum of a common signal s and independent noise. With q = |s|^2 / E|g|^2
    the mean cosine is about q, the share of signal in the squared length of a batch's gradient; for
    the gradient of n batches together this share is n q / (1 + (n - 1) q). As pairs share batches,
    the standard error is a jackknife, which leaves out one batch at a time. Raises ValueError for
    fewer than 3 batches, and for a gradient of zero.
    """
    count = len(gradients)
    if count < 3:
        raise ValueError(f"{count} batches: at least 3 are needed for a standard error")
    rows = torch.stack([part.double() for part in gradients])
    norms = rows.norm(dim=1, keepdim=True)
    if not bool((norms > 0).all()):
        raise ValueError("a gradient is zero: all rewards of its batch are equal")
    rows = rows / norms
    cosines = (rows @ rows.T).numpy()

    def over(chosen: Sequence[int]) -> float:
        return float(np.mean([cosines[i, j] for i, j in itertools.combinations(chosen, 2)]))

    without = np.array([over([j for j in range(count) if j != i]) for i in range(count)])
    spread = float(np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum()))
    return Cosine(over(range(count)), spread, count)
