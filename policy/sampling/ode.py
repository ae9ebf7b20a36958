"""Deterministic solvers of dx/dsigma = v(x, sigma) from sigma_0 down to 0.

x [B, *latent] float32, sigmas [T + 1] float32 strictly descending with last 0; the state stays
float32. T calls of the velocity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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
    return _multistep(velocity, x, sigmas, corrects=False)


def unipc(velocity: Velocity, x: Tensor, sigmas: Tensor) -> Tensor:
    """UniPC (arXiv 2302.04867, algorithms 3 and 4) of order 2 for x0 with B_2(h) = exp(h) - 1.

    Its predictor, UniP-2, is the step of ``dpmpp_2m``. Once x0_{i+1} is known at what that
    predicts, the corrector UniC repeats the step from i with it, at no further call:
    D = x0_i + b (x0_{i+1} - x0_i) + a (x0_{i-1} - x0_i), where a and b solve the order
    conditions: b = 1/2, a = 0 in a first step; otherwise, with q = -1 / r,
    b_1 = 1 / (1 - exp(-h)) - 1 / h,  b_2 = 1 / (1 - exp(-h)) - 2 b_1 / h,
    b = b_1 - (b_1 - b_2) q / (q - 1),  a = (b_1 - b_2) q^2 / (q - 1). The last step is not
    corrected.
    """
    return _multistep(velocity, x, sigmas, corrects=True)


@dataclass(frozen=True)
class _Step:
    """One that was taken: x <- ``carried`` + ``gain`` D, to be taken again with another D."""

    carried: Tensor
    gain: float
    h: float
    inverse_ratio: float  # h over the step before's; 0 where that does not count
    x0: Tensor
    previous: Tensor | None

    def corrected(self, x0: Tensor) -> Tensor:
        """The state after UniC's correction by the clean sample ``x0`` at the predicted state."""
        if self.previous is None:
            return self.carried + self.gain * (self.x0 + 0.5 * (x0 - self.x0))
        q, whole = -self.inverse_ratio, -1 / math.expm1(-self.h)
        first = whole - 1 / self.h
        second = whole - 2 * first / self.h
        beside = (first - second) * q / (q - 1)
        target = self.x0 + (first - beside) * (x0 - self.x0)
        return self.carried + self.gain * (target + beside * q * (self.previous - self.x0))


def _multistep(velocity: Velocity, x: Tensor, sigmas: Tensor, corrects: bool) -> Tensor:
    on_device = sigmas.to(x.device)
    points = sigmas.double().tolist()
    lambdas = [_log_snr(sigma) for sigma in points]
    last = len(points) - 2
    taken: _Step | None = None
    for i in range(last + 1):
        now, after = points[i], points[i + 1]
        x0 = x - now * velocity(x, on_device[i])
        if corrects and taken is not None:
            x = taken.corrected(x0)
        target, inverse_ratio, previous = x0, 0.0, None
        if taken is not None and i < last:
            previous = taken.x0
            inverse_ratio = (lambdas[i + 1] - lambdas[i]) / (lambdas[i] - lambdas[i - 1])
            target = x0 + (0.5 * inverse_ratio) * (x0 - previous)
        carried, gain = (after / now) * x, (1 - after) - after * (1 - now) / now
        taken = _Step(carried, gain, lambdas[i + 1] - lambdas[i], inverse_ratio, x0, previous)
        x = carried + gain * target
    return x


def _log_snr(sigma: float) -> float:
    if sigma >= 1:
        return -math.inf
    return math.log((1 - sigma) / sigma) if sigma > 0 else math.inf


SOLVERS: dict[str, Callable[[Velocity, Tensor, Tensor], Tensor]] = {
    "euler": euler,
    "dpmpp_2m": dpmpp_2m,
    "unipc": unipc,
}
