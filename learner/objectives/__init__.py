"""Training objectives, one file each: its file, its settings and this table know its name."""

from __future__ import annotations

from collections.abc import Callable

from configs.objectives import Objective as ObjectiveTable
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


def build_objective(settings: ObjectiveTable, measure_kl: bool = False) -> Objective:
    """The objective of ``[objective]``; ``measure_kl``: with loss/kl even where it weighs 0."""
    return OBJECTIVES[settings.name](settings, measure_kl)


__all__ = ["OBJECTIVES", "Objective", "Points", "Record", "build_objective"]
