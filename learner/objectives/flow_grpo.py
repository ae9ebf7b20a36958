"""FlowGRPO: GRPO on the paths of Flow-SDE (arXiv 2505.05470)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from configs.objective import PathSettings, tolerant_floor
from learner.objectives.grpo import PathGRPO


class FlowGRPOSettings(PathSettings):
    """FlowGRPO (arXiv 2505.05470): GRPO on the paths of Flow-SDE."""

    solvers = ("flow_sde",)

    name: Literal["flow_grpo"] = "flow_grpo"
    eta: float = Field(default=0.7, gt=0, description="noise level of the stochastic solver")
    kl: float = Field(
        default=0.04,
        ge=0,
        description=(
            "weight beta of the KL divergence to the reference model; published recipes"
            " use 0.04 or 0.01"
        ),
    )
    step_fraction: float = Field(
        default=0.99,
        gt=0,
        le=1,
        description=(
            "share of the steps, from the first, that is trained on; 0.99 excludes the"
            " last of up to 100 steps"
        ),
    )

    def trained_steps(self, steps: int) -> Sequence[int]:
        return range(tolerant_floor(self.step_fraction * steps))


class FlowGRPO(PathGRPO):
    """``PathGRPO`` with KL to the reference, on the first ``step_fraction`` of a path's steps."""

    Settings = FlowGRPOSettings

    def __init__(self, settings: FlowGRPOSettings, measure_kl: bool = False) -> None:
        super().__init__(settings, settings.kl, measure_kl)
