"""How much of a gradient is signal: the cosine between gradients of independent batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learner.advantages import advantages
from learner.batch import Group, joined
from learner.trainer import Trainer


@dataclass(frozen=True)
class Cosine:
    """The mean cosine over all pairs of batches; its standard error is a jackknife over batches."""

    mean: float
    stderr: float
    batches: int


def gradient(trainer: Trainer, batch: int, groups: Sequence[Group]) -> Tensor:
    """The gradient of one optimizer step on ``groups``, flat, float32 [D]; nothing is changed.

    ``batch`` names the random streams, as an iteration does. Raises NonFiniteTraining.
    """
    config = trainer.config
    values, _ = advantages([group.rewards for group in groups], config.resolved_advantages)
    of_prompt = {group.prompt_index: part for group, part in zip(groups, values, strict=True)}
    samples = joined(groups, of_prompt, config.seed, batch, trainer.device)
    return trainer.updater.gradient(samples, trainer.sigmas)


def mean_cosine(gradients: Sequence[Tensor]) -> Cosine:
    """Of B >= 3 gradients [D] of independent batches.

    A gradient is signal s, common to all, and noise of its own; with |s|^2 / E|g|^2 = q the mean
    cosine is about q: of a batch this share of the squared length is signal, and the gradient of n
    batches together has n q / (1 + (n - 1) q). Pairs share batches, so the standard error leaves
    out a batch at a time. Raises ValueError for fewer batches, and for a gradient of zero.
    """
    count = len(gradients)
    if count < 3:
        raise ValueError(f"{count} batches: at least 3 are needed for a standard error")
    rows = torch.stack([part.double() for part in gradients])
    norms = rows.norm(dim=1, keepdim=True)
    if not bool((norms > 0).all()):
        raise ValueError("a gradient is zero: no reward of its batch differs from another")
    rows = rows / norms
    cosines = (rows @ rows.T).numpy()

    def over(chosen: Sequence[int]) -> float:
        return float(np.mean([cosines[i, j] for i, j in itertools.combinations(chosen, 2)]))

    without = np.array([over([j for j in range(count) if j != i]) for i in range(count)])
    spread = float(np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum()))
    return Cosine(over(range(count)), spread, count)
