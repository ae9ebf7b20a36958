"""Stochastic solvers with the marginals of the flow dx = v dsigma and a density per step.

With the score s of the marginal at sigma, any noise level g(sigma) >= 0 keeps the marginals (arXiv
2011.13456, appendix D.1): dx = (v - g^2 s / 2) dsigma + g dW, with decreasing sigma. One step from
sigma to sigma_next is Gaussian with the mean and std given below; dsigma = sigma_next - sigma < 0.
The solvers differ in g. Both are of weak order 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NEARLY_ONE = 0.9989
"""Sigma from which on 1 / (1 - sigma) is not used for the noise level.

Schedules on 1000 training timesteps start at sigma = 1, or at 0.999 or above.
"""


@dataclass(frozen=True)
class Step:
    """Gaussian transition of one step for B states: x_next ~ N(mean, std^2)."""

    mean: Tensor  # [B, *latent], dtype of x
    std: Tensor  # [B, 1, ...], dtype of x
    length: Tensor  # [B, 1, ...], -dsigma

    def log_prob(self, x_next: Tensor) -> Tensor:
        """Return the log-density of x_next [B, *latent], averaged over latent dimensions: [B]."""
        z = (x_next - self.mean) / self.std
        return (-0.5 * z**2 - self.std.log() - 0.5 * math.log(2 * math.pi)).flatten(1).mean(1)


def flow_sde(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: float) -> Step:
    """Step of Flow-SDE (update rule of FlowGRPO, arXiv 2505.05470).

    g = eta sqrt(sigma / (1 - sigma)), std = g sqrt(-dsigma), and
    mean = x (1 + g^2 dsigma / (2 sigma)) + v (1 + g^2 (1 - sigma) / (2 sigma)) dsigma.
    x, v are [B, *latent], sigmas [B], sigma > sigma_next >= 0. If sigma is above NEARLY_ONE, as in
    a first step from sigma = 1, the denominator of g uses sigma_next.
    """
    now, length = _columns(x, sigma, sigma_next)
    below = torch.where(now > NEARLY_ONE, now - length, now)
    return _step(x, v, now, length, eta**2 * now / (1 - below))


def dance_sde(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: float) -> Step:
    """Step of Dance-SDE (DanceGRPO, arXiv 2505.07818): g = eta; std = eta sqrt(-dsigma).

    mean = x + v dsigma - eta^2 s dsigma / 2 with s = -(x - (1 - sigma) x0_hat) / sigma^2. With
    x0_hat = x - sigma v that is s = -(x + (1 - sigma) v) / sigma, and the mean has the form of
    ``flow_sde``. x, v [B, *latent], sigmas [B].
    """
    now, length = _columns(x, sigma, sigma_next)
    return _step(x, v, now, length, torch.full_like(now, eta**2))


def _columns(x: Tensor, sigma: Tensor, sigma_next: Tensor) -> tuple[Tensor, Tensor]:
    """Return sigma and -dsigma, float64 [B, 1, ...] on x's device."""
    shape = (len(x), *[1] * (x.ndim - 1))
    now, after = (value.to(x.device, torch.float64).reshape(shape) for value in (sigma, sigma_next))
    return now, now - after


def _step(x: Tensor, v: Tensor, now: Tensor, length: Tensor, square: Tensor) -> Step:
    """Return the step with g^2 = ``square``."""
    # coefficients in float64, rounded once, so that they do not depend on the batch
    x_factor = 1 - square * length / (2 * now)
    v_factor = -(1 + square * (1 - now) / (2 * now)) * length
    return Step(
        x_factor.to(x) * x + v_factor.to(x) * v, (square * length).sqrt().to(x), length.to(x)
    )


TRANSITIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, float], Step]] = {
    "flow_sde": flow_sde,
    "dance_sde": dance_sde,
}


@dataclass(frozen=True)
class PathSolver:
    """A stochastic solver with its noise level ``eta``."""

    name: str
    eta: float

    def step(self, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> Step:
        """Return the step from x [B, *latent] with velocity v at sigma [B] to sigma_next [B]."""
        return TRANSITIONS[self.name](x, v, sigma, sigma_next, self.eta)

    def std(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """Return the standard deviation float64 [B] of steps from sigma [B] to sigma_next [B]."""
        zeros = torch.zeros(len(sigma), 1, dtype=torch.float64)
        return self.step(zeros, zeros, sigma.cpu(), sigma_next.cpu()).std[:, 0]

    def decoded(self, x: Tensor, v: Tensor, sigma: Tensor, x_next: Tensor) -> Tensor:
        """Return the latents to decode after a path's last step from x at sigma [B] to x_next.

        v is the velocity at x; x, v and x_next are [B, *latent]. With ``dance_sde`` the result is
        the predicted clean sample x - sigma v, as in DanceGRPO's public code: the last step is
        never trained on, and its noise, of the same level as in other steps, would only affect the
        reward.
        """
        if self.name != "dance_sde":
            return x_next
        now, _ = _columns(x, sigma, sigma)
        return x - now.to(x) * v
