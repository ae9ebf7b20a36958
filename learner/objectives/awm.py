"""AWM, advantage weighted matching: a policy gradient on the forward process.

Source: arXiv 2509.25050, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from configs.objective import ObjectiveSettings, tolerant_floor
from learner.objectives.base import Points, clipped_surrogate, diffuse, distance, per_point_mean

if TYPE_CHECKING:
    from torch import Tensor

    from policy.sampling.sde import PathSolver

# added to an error before its root is taken, whose slope at 0 is infinite
TINY = 1e-10
ANCHOR = "anchor"


class AWMSettings(ObjectiveSettings):
    """Advantage weighted matching (arXiv 2509.25050).

    A policy gradient with the flow-matching loss in the place of the log-probability.
    """

    name: Literal["awm"] = "awm"
    weighting: Literal["uniform", "t", "t2", "huber", "ghuber"] = Field(
        default="ghuber",
        description="loss for the squared error e at time t: e, t e, t^2 e, or a Huber loss of e",
    )
    huber_power: float = Field(
        default=0.25, gt=0, le=1, description="exponent p of weighting 'ghuber'"
    )
    ratio_clip: float = Field(
        default=1.0, gt=0, description="e: probability ratios are clipped to [1 - e, 1 + e]"
    )
    kl: float = Field(
        default=1e-3,
        ge=0,
        description=(
            "weight of the squared velocity distance to the reference model (adapters off)"
        ),
    )
    ema: float = Field(
        default=1.0,
        ge=0,
        description="weight of the squared velocity distance to the objective's moving average",
    )
    ema_slope: float = Field(
        default=0.001,
        ge=0,
        description=(
            "slope: the decay of that average after iteration s is min(ema_slope s, ema_cap)"
        ),
    )
    ema_cap: float = Field(default=0.3, ge=0, lt=1, description="maximum decay of that average")
    advantage_clip: float = Field(
        default=5.0, gt=0, description="c: advantages are clipped to [-c, c] and divided by c"
    )
    times_per_sample: int = Field(
        default=6,
        ge=1,
        description=(
            "number of training times per sample, one in each of equal parts of the schedule"
        ),
    )
    schedule_fraction: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="training times are drawn from this first fraction of the schedule",
    )
    first_step: bool = Field(
        default=False, description="include the schedule's first time, as in AWM's PickScore recipe"
    )

    def trained_steps(self, steps: int) -> Sequence[int]:
        return range(0 if self.first_step else 1, tolerant_floor(self.schedule_fraction * steps))


class AWM:
    """Policy gradient in which the flow-matching loss replaces the negative log-probability.

        e = mean((v - (eps - x0))^2),  log p = -w(t, e)
        A' = clip(A, -c, c) / c,  r = exp(log p - log p_old)
        loss = mean(max(-A' r, -A' clip(r, 1 - e', 1 + e')))
               + kl mean((v - v_ref)^2) + ema mean((v - v_anchor)^2)

    ``log p_old`` is that of the weights that drew the samples, at the same eps and t. e and w are
    in float64. The anchor is the objective's own average of the trained weights, with decay
    min(ema_slope s, ema_cap) after iteration s.
    """

    Settings = AWMSettings
    sampling_adapter = "old"
    path_solver: PathSolver | None = None

    def __init__(self, settings: AWMSettings, measure_kl: bool = False) -> None:
        self.settings = settings
        reference = ("ref",) if settings.kl > 0 or measure_kl else ()
        anchor = (ANCHOR,) if settings.ema > 0 else ()
        self.policies: tuple[str, ...] = ("current", "old", *reference, *anchor)
        self.averages: Mapping[str, Callable[[int], float]] = (
            {ANCHOR: self._anchor_decay} if anchor else {}
        )

    def _anchor_decay(self, s: int) -> float:
        return min(self.settings.ema_slope * s, self.settings.ema_cap)

    def points(
        self, samples: Mapping[str, Tensor], sigmas: Tensor, rng: np.random.Generator
    ) -> Points:
        """Return ``times_per_sample`` points of each sample, at stratified times.

        The trained steps of the schedule are divided into as many parts, and one time is drawn from
        each. A part narrower than one step uses the step in which it begins.
        """
        import torch

        steps = self.settings.trained_steps(len(sigmas) - 1)
        count, latents = self.settings.times_per_sample, samples["latents"]
        # 1e-9: an edge that linspace rounds to just below a whole number counts as that number
        edges = np.floor(np.linspace(0, len(steps), count + 1) + 1e-9).astype(int)
        low, width = edges[:-1], np.diff(edges)
        drawn = low + np.floor(rng.random((len(latents), count)) * width).astype(int)
        times = sigmas.cpu()[torch.from_numpy(np.asarray(steps)[drawn])]
        return diffuse(latents, times, rng)

    def loss(
        self, points: Points, velocities: Mapping[str, Tensor], advantages: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar float64 loss and the metrics.

        Metrics are loss/policy, loss/ratio, loss/clip_share, loss/kl and loss/ema; the last two are
        unweighted, and present only if their policies are used.
        """
        settings, current = self.settings, velocities["current"]
        weight = (advantages.double() / settings.advantage_clip).clamp(-1, 1)
        log_prob = self._log_prob(points, current)
        old = self._log_prob(points, velocities["old"].detach())
        loss, metrics = clipped_surrogate(weight, log_prob, old, settings.ratio_clip)
        for name, policy, factor in (
            ("loss/kl", "ref", settings.kl),
            ("loss/ema", ANCHOR, settings.ema),
        ):
            if policy in self.policies:
                squared_distance = distance(current, velocities[policy])
                loss, metrics[name] = loss + factor * squared_distance, squared_distance.detach()
        return loss, metrics

    def _log_prob(self, points: Points, velocity: Tensor) -> Tensor:
        """Return -w(t, e) of each point: float64 [P]."""
        target = points.extras["eps"].double() - points.extras["x0"].double()
        error, t = per_point_mean((velocity.double() - target) ** 2), points.sigma.double()
        match self.settings.weighting:
            case "uniform":
                return -error
            case "t":
                return -t * error
            case "t2":
                return -(t**2) * error
            case "huber":
                return -t * ((error + TINY).sqrt() - TINY**0.5)
            case "ghuber":
                power = self.settings.huber_power
                return -t * ((error + TINY) ** power - TINY**power) / power
