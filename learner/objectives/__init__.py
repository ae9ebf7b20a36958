"""Training objectives, one file each. Only its own file, its settings and this table know an
objective's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from learner.objectives.awm import AWM
from learner.objectives.base import Objective, Points, Record
from learner.objectives.dance_grpo import DanceGRPO
from learner.objectives.diffusion_nft import DiffusionNFT
from learner.objectives.flow_grpo import FlowGRPO

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "diffusion_nft": DiffusionNFT,
    "awm": AWM,
    "flow_grpo": FlowGRPO,
    "dance_grpo": DanceGRPO,
}
"""``settings.name`` -> constructor taking (settings, measure_kl)."""


def build_objective(settings: Any, measure_kl: bool = False) -> Objective:
    """The objective of ``[objective]``; ``measure_kl`` asks for the metric loss/kl even where its
    weight is 0.
    """
    return OBJECTIVES[settings.name](settings, measure_kl)


__all__ = ["OBJECTIVES", "Objective", "Points", "Record", "build_objective"]
