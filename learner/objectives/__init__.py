"""Training objectives, one file each, with settings and formula: only that file and its row know
its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from configs.named import named_class
from configs.objective import ObjectiveSettings
from configs.objectives import OBJECTIVES
from learner.objectives.base import Objective


def build_objective(settings: ObjectiveSettings, measure_kl: bool = False) -> Objective:
    """The objective of ``[objective]``; ``measure_kl``: with loss/kl even where it weighs 0."""
    make = cast("Callable[..., Objective]", named_class(OBJECTIVES[settings.name], object))
    return make(settings, measure_kl)
