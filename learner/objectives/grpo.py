"""What FlowGRPO and DanceGRPO share: the clipped policy gradient on the steps of stochastic
sampling paths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from configs.objectives import DanceGRPOSettings, FlowGRPOSettings
from learner.objectives.base import Points, clipped_surrogate, per_point_mean
from policy.sampling.sde import PathSolver


class PathGRPO(ABC):
    """A point is one step j of a sample's path, an action with a Gaussian density.

        log p = mean over latent dimensions of log N(x_{j+1}; mean_theta(x_j), std^2),  r = exp(log
        p - log p_old) A' = clip(A, -c, c),  loss = mean(max(-A' r, -A' clip(r, 1 - e, 1 + e))) + kl
        mean((mean_theta - mean_ref)^2) / (2 g^2)

    with std = g sqrt(-dsigma). ``log p_old`` is that of the weights the samples were drawn with,
    computed again in the very batch of log p: a forward pass depends in its last bits on the shape
    of its batch, and with e = 1e-4 the ratio must not. The stored log-probability checks that the
    path is theirs: loss/log_prob_drift is the mean absolute difference.
    """

    sampling_adapter = "old"
    averages: Mapping[str, Callable[[int], float]] = {}

    def __init__(
        self, settings: FlowGRPOSettings | DanceGRPOSettings, kl: float, measure_kl: bool
    ) -> None:
        self.clip, self.advantage_clip, self.kl = settings.ratio_clip, settings.advantage_clip, kl
        self.path_solver = PathSolver(settings.solvers[0], settings.eta)
        self.one_noise = settings.one_noise_per_group
        self.policies: tuple[str, ...] = (
            ("current", "old", "ref") if kl > 0 or measure_kl else ("current", "old")
        )

    @abstractmethod
    def steps(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Which of a path's ``count`` steps are trained on: ascending positions."""

    def points(
        self, samples: Mapping[str, Tensor], sigmas: Tensor, rng: np.random.Generator
    ) -> Points:
        """The trained steps of each sample, sample by sample, from "states" [S, T + 1, *latent] and
        "log_probs" [S, T].

        Raises ValueError where a path has not as many steps as the schedule [T + 1].
        """
        states, stored = samples["states"], samples["log_probs"]
        count = len(sigmas) - 1
        if states.shape[1] != count + 1 or stored.shape != (len(states), count):
            raise ValueError(
                f"paths of {states.shape[1] - 1} steps, the schedule has {count}: regenerate with"
                " the steps that are trained on"
            )
        chosen = [self.steps(count, rng) for _ in range(len(states))]
        row = torch.from_numpy(np.repeat(np.arange(len(states)), [len(part) for part in chosen]))
        j = torch.from_numpy(np.concatenate(chosen))
        given = {
            "x_next": states[row, j + 1],
            "sigma_next": sigmas.cpu()[j + 1],
            "log_prob": stored[row, j],
        }
        return Points(states[row, j], sigmas.cpu()[j], row, given)

    def loss(
        self, points: Points, velocities: Mapping[str, Tensor], advantages: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalar float64 loss; metrics loss/policy, loss/ratio, loss/clip_share,
        loss/log_prob_drift and loss/kl (unweighted).
        """
        x, after, x_next = points.x_t, points.given["sigma_next"], points.given["x_next"]
        steps = {
            name: self.path_solver.step(x, v, points.sigma, after) for name, v in velocities.items()
        }
        current, old = steps["current"], steps["old"].log_prob(x_next).detach()
        weight = advantages.clamp(-self.advantage_clip, self.advantage_clip)
        loss, metrics = clipped_surrogate(weight, current.log_prob(x_next), old, self.clip)
        metrics["loss/log_prob_drift"] = (old - points.given["log_prob"]).abs().double().mean()
        if "ref" in self.policies:
            apart = per_point_mean(
                (current.mean - steps["ref"].mean.detach()) ** 2
                * current.length
                / (2 * current.std**2)
            )
            kl = apart.double().mean()
            loss, metrics["loss/kl"] = loss + self.kl * kl, kl.detach()
        return loss, metrics
