"""DiffusionNFT: online diffusion RL on the forward process.

Source: arXiv 2509.16117, the loss of its algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from configs.objective import ObjectiveSettings
from learner.objectives.base import Points, diffuse, distance, draw_times, per_point_mean

if TYPE_CHECKING:
    from torch import Tensor

    from policy.sampling.sde import PathSolver

SMALLEST_WEIGHT = 1e-5


class DiffusionNFTSettings(ObjectiveSettings):
    """DiffusionNFT (arXiv 2509.16117): negative-aware fine-tuning on the forward process."""

    old_schedule = "linear_cap"

    name: Literal["diffusion_nft"] = "diffusion_nft"
    beta: float = Field(
        default=1.0,
        gt=0,
        le=10,
        description="mixing strength of the implicit positive and negative policies",
    )
    kl: float = Field(
        default=1e-4,
        ge=0,
        description=(
            "weight of the squared velocity distance to the reference model (adapters off)"
        ),
    )
    advantage_clip: float = Field(
        default=5.0, gt=0, description="c: advantages are clipped to [-c, c] and divided by c"
    )
    times_per_sample: int = Field(
        default=6,
        ge=1,
        description="number of training times per sample, drawn from the regeneration schedule",
    )


class DiffusionNFT:
    """Negative-aware fine-tuning with implicit positive and negative policies.

    Samples with high reward train the positive policy, those with low reward the negative one.

        v+ = b v + (1 - b) v_old,  v- = (1 + b) v_old - b v                 (v = v_theta, b = beta)
        L(u) = mean((x_t - t u - x0)^2) / stopgrad(max(mean |x_t - t u - x0|, 1e-5))
        r = clip(A / c, -1, 1) / 2 + 1/2
        loss = c mean(r L(v+) / b + (1 - r) L(v-) / b) + kl mean((v - v_ref)^2)

    Means inside L are per point, the outer ones over points. The weight and the division are in
    float64. ``measure_kl`` requests the reference's velocities, and so the metric loss/kl, even if
    kl is 0.
    """

    Settings = DiffusionNFTSettings
    sampling_adapter = "old"
    path_solver: PathSolver | None = None
    averages: Mapping[str, Callable[[int], float]] = {}

    def __init__(self, settings: DiffusionNFTSettings, measure_kl: bool = False) -> None:
        self.settings = settings
        self.policies: tuple[str, ...] = (
            ("current", "old", "ref") if settings.kl > 0 or measure_kl else ("current", "old")
        )

    def points(
        self, samples: Mapping[str, Tensor], sigmas: Tensor, rng: np.random.Generator
    ) -> Points:
        """Return ``times_per_sample`` points of each sample.

        Their times are drawn from the schedule [T + 1]; every point has its own eps.
        """
        latents = samples["latents"]
        return diffuse(
            latents, draw_times(sigmas, len(latents), self.settings.times_per_sample, rng), rng
        )

    def loss(
        self, points: Points, velocities: Mapping[str, Tensor], advantages: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar float64 loss and the metrics loss/policy and loss/kl.

        Both metrics are means over points; loss/kl is unweighted.
        """
        beta, clip = self.settings.beta, self.settings.advantage_clip
        current, old = velocities["current"], velocities["old"].detach()
        share = (advantages.double() / clip).clamp(-1, 1) / 2 + 0.5
        positive = _residual_loss(points, beta * current + (1 - beta) * old)
        negative = _residual_loss(points, (1 + beta) * old - beta * current)
        policy = clip * ((share * positive + (1 - share) * negative) / beta).mean()
        metrics = {"loss/policy": policy.detach()}
        if "ref" not in self.policies:
            return policy, metrics
        kl = distance(current, velocities["ref"])
        return policy + self.settings.kl * kl, metrics | {"loss/kl": kl.detach()}


def _residual_loss(points: Points, velocity: Tensor) -> Tensor:
    """Return L of the class docstring for each point: float64 [P]."""
    t = points.sigma.reshape(-1, *[1] * (points.x_t.ndim - 1))
    residual = points.x_t - t * velocity - points.extras["x0"]
    weight = per_point_mean(residual.detach().double().abs()).clamp(min=SMALLEST_WEIGHT)
    return per_point_mean(residual**2).double() / weight
