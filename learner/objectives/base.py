"""Interface and common functions of objectives, which map tensors to a scalar loss.

Objectives do not depend on models, actors or loggers.

Notation: x_t = (1 - t) x0 + t eps, t in (0, 1], v = eps - x0, x0_hat = x_t - t v; sigma is t. S is
the number of samples, P that of points; a point is one (sample, training time) pair, or one step of
a sample's path.

Torch is imported inside functions: loading a configuration imports these modules for their
settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from policy.sampling.sde import PathSolver

Record = dict[str, np.ndarray]
"""K samples as named arrays, in which they are sent between processes.

"latents" float32 [K, *latent] is always present. Samples drawn by a stochastic solver also have
"states" float32 [K, T + 1, *latent] and "log_probs" float32 [K, T].
"""


@dataclass(frozen=True)
class Points:
    """A batch of P training points."""

    x_t: Tensor  # float32 [P, *latent]
    sigma: Tensor  # float32 [P]
    sample_index: Tensor  # int64 [P], the sample of each point
    extras: dict[str, Tensor]  # [P, ...] each, further inputs of the objective's loss

    def __len__(self) -> int:
        return len(self.sigma)

    def of_samples(self, offset: int) -> Points:
        """Return the same points with ``offset`` added to their sample indices."""
        return Points(self.x_t, self.sigma, self.sample_index + offset, self.extras)

    def rows(self, part: slice) -> Points:
        """Return the points of a slice."""
        return self._each(lambda tensor: tensor[part])

    def to(self, device: torch.device | str) -> Points:
        """Return the points on ``device``."""
        return self._each(lambda tensor: tensor.to(device))

    @staticmethod
    def cat(parts: Sequence[Points]) -> Points:
        """Concatenate the points of all parts; sample indices stay unchanged."""
        import torch

        given = {name: torch.cat([part.extras[name] for part in parts]) for name in parts[0].extras}
        x_t, sigma, index = (
            torch.cat([getattr(p, name) for p in parts])
            for name in ("x_t", "sigma", "sample_index")
        )
        return Points(x_t, sigma, index, given)

    def _each(self, do: Callable[[Tensor], Tensor]) -> Points:
        given = {name: do(tensor) for name, tensor in self.extras.items()}
        return Points(do(self.x_t), do(self.sigma), do(self.sample_index), given)


class Objective(Protocol):
    """Interface of a training objective.

    ``sampling_adapter`` is the adapter that explores and regenerates. ``policies`` are those whose
    velocities ``loss`` needs: "current" (trained), "ref" (adapters off), other adapters by name.
    ``path_solver`` draws the samples if the objective trains on stochastic paths; None if any
    deterministic solver may. ``averages`` are adapters of the objective itself that follow the
    trained one, with their decay after iteration s = 1, 2, ...
    """

    sampling_adapter: str
    policies: tuple[str, ...]
    averages: Mapping[str, Callable[[int], float]]

    @property
    def path_solver(self) -> PathSolver | None: ...

    def points(
        self, samples: Mapping[str, Tensor], sigmas: Tensor, rng: np.random.Generator
    ) -> Points:
        """Return the training points of S samples.

        ``samples`` are named tensors [S, ...] as in ``Record``; ``sigmas`` float32 [T + 1] is their
        schedule.
        """
        ...

    def loss(
        self, points: Points, velocities: Mapping[str, Tensor], advantages: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and the metrics, each a 0-dim mean over the points.

        As they are means, batches can be split and averaged. ``velocities``: policy -> float32
        [P, *latent], with gradient for "current" only; ``advantages``: float32 [P].
        """
        ...


def draw_times(sigmas: Tensor, samples: int, times: int, rng: np.random.Generator) -> Tensor:
    """Draw training times float32 [samples, times] from the schedule without its final 0.

    The times of a sample are distinct if the schedule has that many. Otherwise the numbers of
    occurrences of its times within a sample differ by at most one.
    """
    import torch

    grid = sigmas[:-1].cpu().numpy()
    rounds = -(-times // len(grid))
    rows = [
        np.concatenate([rng.permutation(grid) for _ in range(rounds)])[:times]
        for _ in range(samples)
    ]
    return torch.from_numpy(np.stack(rows).astype(np.float32))


def diffuse(samples: Tensor, times: Tensor, rng: np.random.Generator) -> Points:
    """Return points x_t = (1 - t) x0 + t eps with new eps, of samples [S, *latent], times [S, T].

    There are P = S * T points, ordered by sample. ``extras`` holds x0 and eps, [P, *latent] each.
    """
    import torch

    count, per_sample = times.shape
    sigma = times.reshape(-1).to(samples.device)
    index = torch.arange(count, device=samples.device).repeat_interleave(per_sample)
    x0 = samples.float()[index]
    eps = torch.from_numpy(rng.standard_normal(tuple(x0.shape), np.float32)).to(samples.device)
    t = sigma.reshape(-1, *[1] * (x0.ndim - 1))
    return Points((1 - t) * x0 + t * eps, sigma, index, {"x0": x0, "eps": eps})


def per_point_mean(x: Tensor) -> Tensor:
    """Return the mean over all dimensions but the first: [P, *latent] -> [P]."""
    return x.flatten(1).mean(1)


def distance(velocity: Tensor, other: Tensor) -> Tensor:
    """Return the mean squared distance of velocities [P, *latent]: float64 [].

    No gradient flows to ``other``.
    """
    return per_point_mean((velocity - other.detach()) ** 2).double().mean()


def clipped_surrogate(
    advantages: Tensor, log_prob: Tensor, old_log_prob: Tensor, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's clipped loss, float64 [], and its metrics (arXiv 1707.06347, eq. 7).

        loss = mean(max(-A r, -A clip(r, 1 - e, 1 + e))),  r = exp(log p - log p_old),  e = clip

    ``advantages`` and log-probabilities are [P]; no gradient flows to ``old_log_prob``. Metrics are
    loss/policy, the mean ratio (loss/ratio) and the share of points whose ratio is outside the clip
    range (loss/clip_share).
    """
    ratio = (log_prob - old_log_prob.detach()).exp()
    weight = advantages.to(ratio)
    loss = (-weight * ratio).maximum(-weight * ratio.clamp(1 - clip, 1 + clip)).double().mean()
    outside = ((ratio - 1).abs() > clip).double().mean()
    return loss, {
        "loss/policy": loss.detach(),
        "loss/ratio": ratio.detach().double().mean(),
        "loss/clip_share": outside,
    }
