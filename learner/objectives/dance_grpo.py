"""DanceGRPO: GRPO on the paths of Dance-SDE (arXiv 2505.07818)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from configs.objectives import DanceGRPOSettings, whole_part
from learner.objectives.grpo import PathGRPO


class DanceGRPO(PathGRPO):
    """``PathGRPO`` on a random ``step_fraction`` of each path's steps without its last, at least
    one; no KL.
    """

    def __init__(self, settings: DanceGRPOSettings, measure_kl: bool = False) -> None:
        super().__init__(settings, 0.0, measure_kl)
        self.settings = settings

    def usable(self, count: int) -> Sequence[int]:
        return self.settings.trained_steps(count)

    def drawn(self, usable: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        count = max(whole_part(self.settings.step_fraction * len(usable)), 1)
        return np.sort(rng.permutation(usable)[:count])
