"""What an objective is: tensors in, a scalar out. Objectives know no models, actors or loggers.

Notation: x_t = (1 - t) x0 + t eps, t in (0, 1], v = eps - x0, x0_hat = x_t - t v; sigma is t. S samples, P points, a point being
one (sample, training time) pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

SAMPLED_POLICIES = ("current", "old", "ema")
"""Policies that are adapters; "ref" is the model with its adapters off."""


@dataclass(frozen=True)
class Points:
    """P training points."""

    x_t: Tensor  # float32 [P, *latent]
    sigma: Tensor  # float32 [P]
    x0: Tensor  # float32 [P, *latent]
    eps: Tensor  # float32 [P, *latent]
    sample_index: Tensor  # int64 [P], which sample a point is of

    def __len__(self) -> int:
        return len(self.sigma)

    def rows(self, part: slice) -> Points:
        """Some of the points."""
        return Points(self.x_t[part], self.sigma[part], self.x0[part], self.eps[part], self.sample_index[part])

    def to(self, device: torch.device | str) -> Points:
        """Moved to a device."""
        return Points(*(tensor.to(device) for tensor in (self.x_t, self.sigma, self.x0, self.eps, self.sample_index)))

    @staticmethod
    def cat(parts: Sequence[Points]) -> Points:
        """The points of all parts, in order; sample indices are taken as they are."""
        names = ("x_t", "sigma", "x0", "eps", "sample_index")
        return Points(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


class Objective(Protocol):
    """One training objective.

    ``sampling_adapter`` explores and regenerates; ``policies`` are those whose velocities ``loss`` wants.
    """

    sampling_adapter: str
    policies: tuple[str, ...]

    def points(self, samples: Tensor, sigmas: Tensor, rng: np.random.Generator) -> Points:
        """Training points of samples x0 float32 [S, *latent]; sigmas float32 [T + 1] is the regeneration schedule."""
        ...

    def loss(self, points: Points, velocities: dict[str, Tensor], advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean over the points of the loss, and of metrics, each 0-dim; a mean, so that batches can be split and averaged.

        velocities: policy -> float32 [P, *latent], with gradient for "current" only; advantages float32 [P].
        """
        ...


def draw_times(sigmas: Tensor, samples: int, times: int, rng: np.random.Generator) -> Tensor:
    """Training times [samples, times] from the sampling schedule without its final 0, distinct within a sample.

    Where ``times`` exceeds the schedule, every time occurs the same number of times, give or take one.
    """
    grid = sigmas[:-1].cpu().numpy()
    rounds = -(-times // len(grid))
    rows = [np.concatenate([rng.permutation(grid) for _ in range(rounds)])[:times] for _ in range(samples)]
    return torch.from_numpy(np.stack(rows).astype(np.float32))


def diffuse(samples: Tensor, times: Tensor, rng: np.random.Generator) -> Points:
    """Points x_t = (1 - t) x0 + t eps with fresh eps for samples [S, *latent] at times [S, T]: P = S * T, sample by sample."""
    count, per_sample = times.shape
    sigma = times.reshape(-1).to(samples.device)
    index = torch.arange(count, device=samples.device).repeat_interleave(per_sample)
    x0 = samples.float()[index]
    eps = torch.from_numpy(rng.standard_normal(tuple(x0.shape), np.float32)).to(samples.device)
    t = sigma.reshape(-1, *[1] * (x0.ndim - 1))
    return Points((1 - t) * x0 + t * eps, sigma, x0, eps, index)


def per_point_mean(x: Tensor) -> Tensor:
    """Mean over all dimensions but the first: [P, *latent] -> [P]."""
    return x.flatten(1).mean(1)
