"""DanceGRPO: GRPO on the paths of Dance-SDE (arXiv 2505.07818)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from configs.objective import PathSettings, tolerant_floor
from learner.objectives.grpo import PathGRPO


class DanceGRPOSettings(PathSettings):
    """DanceGRPO (arXiv 2505.07818): GRPO on a random part of the steps of Dance-SDE, without KL."""

    solvers = ("dance_sde",)
    advantage_std = "group"
    advantage_eps = 1e-8

    name: Literal["dance_grpo"] = "dance_grpo"
    eta: float = Field(default=0.3, gt=0, description="noise level of the stochastic solver")
    step_fraction: float = Field(
        default=0.6,
        gt=0,
        le=1,
        description="share of the steps, without the last one, that is drawn for each sample",
    )

    def trained_steps(self, steps: int) -> Sequence[int]:
        return range(steps - 1)


class DanceGRPO(PathGRPO):
    """``PathGRPO`` without KL, on a random part of each path's steps without the last.

    The part is ``step_fraction`` of these steps, and at least one step.
    """

    Settings = DanceGRPOSettings

    def __init__(self, settings: DanceGRPOSettings, measure_kl: bool = False) -> None:
        super().__init__(settings, 0.0, measure_kl)
        self._share = settings.step_fraction

    def drawn(self, usable: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        count = max(tolerant_floor(self._share * len(usable)), 1)
        return np.sort(rng.permutation(usable)[:count])
