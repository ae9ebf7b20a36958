"""What all cells of a comparison must have in common."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from configs.load import ConfigError
from configs.schema import RunConfig

ALIKE = (
    "evaluate.steps",
    "evaluate.solver",
    "evaluate.prompts",
    "evaluate.noises",
    "evaluate.weights",
    "prompts.test",
    "rewards.scorers",
    "rewards.evaluation_scorers",
)
"""Keys that must be equal in all cells, or their scores could not be compared."""


def check_alike(configs: Mapping[str, RunConfig]) -> None:
    """Raises ConfigError unless all ``configs``, by their names, are evaluated alike."""
    (first, one), *others = configs.items()
    for key in ALIKE:
        wanted = attrgetter(key)(one)
        for name, other in others:
            if (found := attrgetter(key)(other)) != wanted:
                raise ConfigError(
                    f"{key}: {wanted!r} in {first}, {found!r} in {name}: scores can be compared"
                    " only when both are evaluated alike"
                )
