"""What the parts of a configuration have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

Tree = dict[str, Any]
"""A table as TOML or JSON has it, before it is checked."""


def _path(value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise ValueError(
            "a path must not be empty and must not hold line breaks or other control characters"
        )
    return value


PathText = Annotated[str, AfterValidator(_path)]
"""A path as it is written in a configuration."""


class Section(BaseModel):
    """A table of the configuration: no unknown keys, no infinite numbers, no later changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
