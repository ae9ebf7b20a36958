"""Training objectives, one file each. Only its own file and its settings know an objective's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from configs.objectives import OBJECTIVES as SETTINGS
from configs.objectives import ObjectiveSettings
from learner.objectives.base import Objective, Points, Record
from policy.types import named_class

OBJECTIVES = {
    name: cast("Callable[..., Objective]", named_class(settings.trained_by, object))
    for name, settings in SETTINGS.items()
}
"""``settings.name`` -> constructor taking (settings, measure_kl)."""


def build_objective(settings: ObjectiveSettings, measure_kl: bool = False) -> Objective:
    """The objective of ``[objective]``; ``measure_kl`` asks for the metric loss/kl even where its
    weight is 0.
    """
    return OBJECTIVES[settings.name](settings, measure_kl)


__all__ = ["OBJECTIVES", "Objective", "Points", "Record", "build_objective"]
