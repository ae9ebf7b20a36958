"""Table of the training objectives by name; a new one is a row here and the file that it names.

These files import torch only within functions, so that a typo in a configuration is found before
torch is loaded, and actors that compute without torch read configurations without importing it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Discriminator, Tag

from configs.lookup import load_class
from configs.objective import ObjectiveSettings

OBJECTIVES: dict[str, str] = {
    "diffusion_nft": "learner.objectives.diffusion_nft:DiffusionNFT",
    "awm": "learner.objectives.awm:AWM",
    "flow_grpo": "learner.objectives.flow_grpo:FlowGRPO",
    "dance_grpo": "learner.objectives.dance_grpo:DanceGRPO",
}
"""Values of ``objective.name`` and the class that implements each, as ``module:class``.

The class attribute ``Settings`` defines the keys of ``[objective]``.
"""
DEFAULT_OBJECTIVE = "diffusion_nft"
SETTINGS: dict[str, type[ObjectiveSettings]] = {
    name: vars(load_class(row, object))["Settings"] for name, row in OBJECTIVES.items()
}


def _name(value: object) -> object:
    """Return the objective's name, by which pydantic chooses the settings class of the table."""
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
    """The table ``[objective]``, validated by the settings class that its ``name`` selects."""
