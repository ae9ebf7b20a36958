"""Deterministic solvers of dx/dsigma = v(x, sigma) from sigma_0 down to 0.

x [B, *latent] float32, sigmas [T + 1] float32 strictly descending with last 0; the state stays
float32. T calls of the velocity.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from policy.types import Velocity


def euler(velocity: Velocity, x: Tensor, sigmas: Tensor) -> Tensor:
    """x <- x + (sigma_{i+1} - sigma_i) v, order 1. Returns x at sigma 0."""
    on_device = sigmas.to(x.device)
    steps = (sigmas[1:] - sigmas[:-1]).tolist()
    for i, step in enumerate(steps):
        x = x + step * velocity(x, on_device[i])
    return x


def dpmpp_2m(velocity: Velocity, x: Tensor, sigmas: Tensor) -> Tensor:
    """DPM-Solver++(2M) (arXiv 2211.01095, algorithm 2) with x0 = x - sigma v and alpha = 1 - sigma.

    With lambda = log(alpha / sigma), h = lambda_{i+1} - lambda_i and r = h_{i-1} / h_i:
    D = x0_i + (x0_i - x0_{i-1}) / (2 r),  x <- (sigma_{i+1} / sigma_i) x + (alpha_{i+1} -
    sigma_{i+1} alpha_i / sigma_i) D. First and last step are of first order. After a start at sigma
    = 1, where lambda is -inf, so is the second: 1 / r = 0.
    """
    on_device = sigmas.to(x.device)
    points = sigmas.double().tolist()
    lambdas = [_log_snr(sigma) for sigma in points]
    last = len(points) - 2
    previous: Tensor | None = None
    for i in range(last + 1):
        now, after = points[i], points[i + 1]
        x0 = x - now * velocity(x, on_device[i])
        target = x0
        if previous is not None and i < last:
            inverse_ratio = (lambdas[i + 1] - lambdas[i]) / (lambdas[i] - lambdas[i - 1])
            target = x0 + (0.5 * inverse_ratio) * (x0 - previous)
        x = (after / now) * x + ((1 - after) - after * (1 - now) / now) * target
        previous = x0
    return x


def _log_snr(sigma: float) -> float:
    if sigma >= 1:
        return -math.inf
    return math.log((1 - sigma) / sigma) if sigma > 0 else math.inf


SOLVERS: dict[str, Callable[[Velocity, Tensor, Tensor], Tensor]] = {
    "euler": euler,
    "dpmpp_2m": dpmpp_2m,
}
