"""What the parts of a configuration have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


def _path(value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise ValueError(
            "a path must not be empty and must not hold line breaks or other control characters"
        )
    return value


PathText = Annotated[str, AfterValidator(_path)]
"""A path as it is written in a configuration."""


class Section(BaseModel):
    """A table of the configuration: unknown keys are errors, values do not change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)
