"""Training objectives, one file each, with the objective's settings and formula.

Only that file and its row in ``configs.objectives.OBJECTIVES`` know an objective's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from configs.lookup import load_class
from configs.objective import ObjectiveSettings
from configs.objectives import OBJECTIVES
from learner.objectives.base import Objective


def build_objective(settings: ObjectiveSettings, measure_kl: bool = False) -> Objective:
    """Return the objective of ``[objective]``; with ``measure_kl``, loss/kl even at weight 0."""
    make = cast("Callable[..., Objective]", load_class(OBJECTIVES[settings.name], object))
    return make(settings, measure_kl)
