"""Base of FlowGRPO and DanceGRPO: clipped policy gradient on steps of stochastic sampling paths."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from configs.objective import PathSettings
from learner.objectives.base import Points, clipped_surrogate, per_point_mean

if TYPE_CHECKING:
    from torch import Tensor

    from policy.sampling.sde import Step


class PathGRPO:
    """GRPO on sampling paths: a point is one step j of a path, an action with Gaussian density.

        log p = mean over latent dimensions of log N(x_{j+1}; mean_theta(x_j), std^2)
        r = exp(log p - log p_old),  A' = clip(A, -c, c)
        loss = mean(max(-A' r, -A' clip(r, 1 - e, 1 + e)))
               + kl mean((mean_theta - mean_ref)^2) / (2 g^2)

    with std = g sqrt(-dsigma). Settings change it in three ways:

    * ``window``: only steps that were drawn stochastically are trained on (MixGRPO, arXiv
      2507.21802).
    * ``noise_weight`` p: A' is multiplied by std^p, scaled so that its mean over a path's trainable
      steps is 1 (TempFlow-GRPO, arXiv 2508.04324, with p = 1).
    * ``ratio_norm``: r = exp(std (log p - log p_old + mean((mean_theta - mean_old)^2) / (2 std^2)))
      and the loss of a step is divided by its -dsigma (GRPO-Guard, arXiv 2510.22319).

    ``log p_old`` is that of the weights that drew the samples, recomputed in the same batch as
    log p: the last bits of a forward pass depend on the shape of its batch, and with e = 1e-4 the
    ratio must not. The stored log-probability verifies that these weights drew the path:
    loss/log_prob_drift is the mean absolute difference.
    """

    sampling_adapter = "old"
    averages: Mapping[str, Callable[[int], float]] = {}

    def __init__(self, settings: PathSettings, kl: float, measure_kl: bool) -> None:
        from policy.sampling.sde import PathSolver

        self._trained_steps = settings.trained_steps
        self.clip, self.advantage_clip, self.kl = settings.ratio_clip, settings.advantage_clip, kl
        self.path_solver = PathSolver(settings.solvers[0], settings.eta)
        self.noise_weight, self.ratio_norm = settings.noise_weight, settings.ratio_norm
        self.policies: tuple[str, ...] = (
            ("current", "old", "ref") if kl > 0 or measure_kl else ("current", "old")
        )

    def drawn(self, usable: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the steps that a sample is trained on, ascending: here all ``usable`` ones."""
        return usable

    def steps(
        self, count: int, rng: np.random.Generator, window: Container[int] | None = None
    ) -> np.ndarray:
        """Draw the trained steps of a path of ``count`` steps that is stochastic in ``window``."""
        return self.drawn(np.asarray(self._usable(count, window)), rng)

    def _usable(self, count: int, window: Container[int] | None) -> list[int]:
        return [j for j in self._trained_steps(count) if window is None or j in window]

    def points(
        self, samples: Mapping[str, Tensor], sigmas: Tensor, rng: np.random.Generator
    ) -> Points:
        """Return the trained steps of all samples as points, ordered by sample.

        They come from "states" [S, T + 1, *latent] and "log_probs" [S, T]. If "stochastic" [S, T]
        is recorded, only the steps that it marks are used. Raises ValueError if a path's number of
        steps differs from the schedule's [T + 1].
        """
        import torch

        states, stored = samples["states"], samples["log_probs"]
        count = len(sigmas) - 1
        if states.shape[1] != count + 1 or stored.shape != (len(states), count):
            raise ValueError(
                f"paths of {states.shape[1] - 1} steps, the schedule has {count}: regenerate with"
                " the same number of steps"
            )
        windows = self._windows(samples, len(states))
        chosen = [self.steps(count, rng, window) for window in windows]
        row = torch.from_numpy(np.repeat(np.arange(len(states)), [len(part) for part in chosen]))
        j = torch.from_numpy(np.concatenate(chosen))
        given = {
            "x_next": states[row, j + 1],
            "sigma_next": sigmas.cpu()[j + 1],
            "log_prob": stored[row, j],
        }
        if self.noise_weight:
            weights = [
                self._weights(part, sigmas.cpu(), window)
                for part, window in zip(chosen, windows, strict=True)
            ]
            given["weight"] = torch.cat(weights)
        return Points(states[row, j], sigmas.cpu()[j], row, given)

    def _windows(
        self, samples: Mapping[str, Tensor], count: int
    ) -> Sequence[Container[int] | None]:
        """Return the stochastic steps of each sample; None: all steps."""
        recorded = samples.get("stochastic")
        if recorded is None:
            return [None] * count
        return [set(row.nonzero().flatten().tolist()) for row in recorded]

    def _weights(self, chosen: np.ndarray, sigmas: Tensor, window: Container[int] | None) -> Tensor:
        """Return std^p of the ``chosen`` steps, divided by its mean over all usable steps."""
        import torch

        weights = self.path_solver.std(sigmas[:-1], sigmas[1:]) ** self.noise_weight
        usable = self._usable(len(weights), window)
        return (weights[torch.from_numpy(chosen)] / weights[usable].mean()).float()

    def loss(
        self, points: Points, velocities: Mapping[str, Tensor], advantages: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar float64 loss and the metrics.

        Metrics are loss/policy, loss/ratio, loss/clip_share, loss/log_prob_drift and, with the
        reference, loss/kl (unweighted).
        """
        x, next_sigma, x_next = points.x_t, points.extras["sigma_next"], points.extras["x_next"]
        steps = {
            name: self.path_solver.step(x, v, points.sigma, next_sigma)
            for name, v in velocities.items()
        }
        current, old = steps["current"], steps["old"].log_prob(x_next).detach()
        weight = advantages.clamp(-self.advantage_clip, self.advantage_clip)
        if "weight" in points.extras:
            weight = weight * points.extras["weight"]
        log_prob, base = current.log_prob(x_next), old
        if self.ratio_norm:
            log_prob, base = self._normed(log_prob - old, steps), old.new_zeros(old.shape)
            weight = weight / current.length.flatten()
        loss, metrics = clipped_surrogate(weight, log_prob, base, self.clip)
        metrics["loss/log_prob_drift"] = (old - points.extras["log_prob"]).abs().double().mean()
        if "ref" in self.policies:
            # divided by 2 g^2, as g^2 = std^2 / length
            kl_per_point = per_point_mean(
                (current.mean - steps["ref"].mean.detach()) ** 2
                * current.length
                / (2 * current.std**2)
            )
            kl = kl_per_point.double().mean()
            loss, metrics["loss/kl"] = loss + self.kl * kl, kl.detach()
        return loss, metrics

    def _normed(self, log_ratio: Tensor, steps: Mapping[str, Step]) -> Tensor:
        """Return the log ratio [P] with the drift of its mean removed, multiplied by std."""
        current, old = steps["current"], steps["old"]
        std = current.std.flatten()
        drift = per_point_mean((current.mean - old.mean.detach()) ** 2) / (2 * std**2)
        return (log_ratio + drift) * std
