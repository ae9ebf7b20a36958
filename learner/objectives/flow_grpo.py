"""FlowGRPO: GRPO on the paths of Flow-SDE (arXiv 2505.05470)."""

from __future__ import annotations

from collections.abc import Sequence

from configs.objectives import FlowGRPOSettings
from learner.objectives.grpo import PathGRPO


class FlowGRPO(PathGRPO):
    """``PathGRPO`` on the first ``step_fraction`` of the steps of every path, with a KL to the
    reference.
    """

    def __init__(self, settings: FlowGRPOSettings, measure_kl: bool = False) -> None:
        super().__init__(settings, settings.kl, measure_kl)
        self.settings = settings

    def usable(self, count: int) -> Sequence[int]:
        return self.settings.trained_steps(count)
