"""The training objectives, by name. A new one is a row here and the file that it names.

Those files import torch only within functions: a typo in a configuration is found before anything
heavy is imported, and actors that go by rules read configurations without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Discriminator, Tag

from configs.named import named_class
from configs.objective import ObjectiveSettings

OBJECTIVES: dict[str, str] = {
    "diffusion_nft": "learner.objectives.diffusion_nft:DiffusionNFT",
    "awm": "learner.objectives.awm:AWM",
    "flow_grpo": "learner.objectives.flow_grpo:FlowGRPO",
    "dance_grpo": "learner.objectives.dance_grpo:DanceGRPO",
}
"""What ``objective.name`` may be, and the class that speaks for it: ``module:class``. Its
``Settings`` are what may stand under ``[objective]``.
"""
DEFAULT_OBJECTIVE = "diffusion_nft"
SETTINGS: dict[str, type[ObjectiveSettings]] = {
    name: vars(named_class(row, object))["Settings"] for name, row in OBJECTIVES.items()
}


def _name(value: object) -> object:
    """The ``name`` that says which settings a table is."""
    if isinstance(value, dict):
        return value.get("name", DEFAULT_OBJECTIVE)
    return getattr(value, "name", None)


if TYPE_CHECKING:
    Objective = ObjectiveSettings
else:
    Objective = Annotated[
        Union[tuple(Annotated[cls, Tag(name)] for name, cls in SETTINGS.items())],  # noqa: UP007
        Discriminator(_name),
    ]
    """``[objective]``: the class that its ``name`` says."""
