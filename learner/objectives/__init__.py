"""Training objectives, one file each: only that file and its settings know its name."""

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
    """The objective of ``[objective]``; ``measure_kl``: with loss/kl even where it weighs 0."""
    return OBJECTIVES[settings.name](settings, measure_kl)


__all__ = ["OBJECTIVES", "Objective", "Points", "Record", "build_objective"]
