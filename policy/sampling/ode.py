"""Deterministic solvers of dx/dsigma = v(x, sigma) from sigma_0 down to 0.

x is float32 [B, *latent], sigmas float32 [T + 1] strictly descending to 0. The state stays float32,
and the velocity is called T times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from policy.types import Velocity


def euler(velocity: Velocity, x: Tensor, sigmas: Tensor) -> Tensor:
    """Solve by Euler steps x <- x + (sigma_{i+1} - sigma_i) v, of order 1; return x at sigma 0."""
    on_device = sigmas.to(x.device)
    steps = (sigmas[1:] - sigmas[:-1]).tolist()
    for i, step in enumerate(steps):
        x = x + step * velocity(x, on_device[i])
    return x


def dpmpp_2m(velocity: Velocity, x: Tensor, sigmas: Tensor) -> Tensor:
    """Solve by DPM-Solver++(2M) (arXiv 2211.01095, algorithm 2).

    With x0 = x - sigma v, alpha = 1 - sigma, lambda = log(alpha / sigma), h = lambda_{i+1} -
    lambda_i and r = h_{i-1} / h_i:
    D = x0_i + (x0_i - x0_{i-1}) / (2 r),  x <- (sigma_{i+1} / sigma_i) x + (alpha_{i+1} -
    sigma_{i+1} alpha_i / sigma_i) D. The first and the last step are of first order. If the first
    sigma is 1, where lambda is -inf, the second step is too, because 1 / r = 0.
    """
    return _multistep(velocity, x, sigmas, corrects=False)


def unipc(velocity: Velocity, x: Tensor, sigmas: Tensor) -> Tensor:
    """Solve by UniPC (arXiv 2302.04867, algorithms 3 and 4) of order 2, B_2(h) = exp(h) - 1.

    It predicts x0. The predictor, UniP-2, is the step of ``dpmpp_2m``. When x0_{i+1} at the
    predicted state is known, the corrector UniC repeats the step from i with it, without another
    call of the velocity:
    D = x0_i + b (x0_{i+1} - x0_i) + a (x0_{i-1} - x0_i), where a and b solve the order
    conditions: b = 1/2, a = 0 in the first step; otherwise, with q = -1 / r,
    b_1 = 1 / (1 - exp(-h)) - 1 / h,  b_2 = 1 / (1 - exp(-h)) - 2 b_1 / h,
    b = b_1 - (b_1 - b_2) q / (q - 1),  a = (b_1 - b_2) q^2 / (q - 1). The last step is not
    corrected.
    """
    return _multistep(velocity, x, sigmas, corrects=True)


@dataclass(frozen=True)
class _Step:
    """A completed step x <- ``carried`` + ``gain`` D, kept to repeat it with a corrected D."""

    carried: Tensor
    gain: float
    h: float
    inverse_ratio: float  # h over that of the previous step; 0 if the latter is not used
    x0: Tensor
    previous: Tensor | None

    def corrected(self, x0: Tensor) -> Tensor:
        """Return the state corrected by UniC, given the clean sample ``x0`` predicted there."""
        if self.previous is None:
            return self.carried + self.gain * (self.x0 + 0.5 * (x0 - self.x0))
        q, phi = -self.inverse_ratio, -1 / math.expm1(-self.h)
        first = phi - 1 / self.h
        second = phi - 2 * first / self.h
        weight = (first - second) * q / (q - 1)
        target = self.x0 + (first - weight) * (x0 - self.x0)
        return self.carried + self.gain * (target + weight * q * (self.previous - self.x0))


def _multistep(velocity: Velocity, x: Tensor, sigmas: Tensor, corrects: bool) -> Tensor:
    on_device = sigmas.to(x.device)
    points = sigmas.double().tolist()
    lambdas = [_log_snr(sigma) for sigma in points]
    last = len(points) - 2
    completed: _Step | None = None
    for i in range(last + 1):
        now, after = points[i], points[i + 1]
        x0 = x - now * velocity(x, on_device[i])
        if corrects and completed is not None:
            x = completed.corrected(x0)
        target, inverse_ratio, previous = x0, 0.0, None
        if completed is not None and i < last:
            previous = completed.x0
            inverse_ratio = (lambdas[i + 1] - lambdas[i]) / (lambdas[i] - lambdas[i - 1])
            target = x0 + (0.5 * inverse_ratio) * (x0 - previous)
        carried, gain = (after / now) * x, (1 - after) - after * (1 - now) / now
        completed = _Step(carried, gain, lambdas[i + 1] - lambdas[i], inverse_ratio, x0, previous)
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
