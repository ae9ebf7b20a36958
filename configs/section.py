"""Base class and types that the tables of a configuration share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

Tree = dict[str, Any]
"""A table as read from TOML or JSON, before validation."""


def _path(value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise ValueError(
            "a path must not be empty and must not hold line breaks or other control characters"
        )
    return value


PathText = Annotated[str, AfterValidator(_path)]
"""A path as written in a configuration: not empty, and without control characters."""


class Section(BaseModel):
    """Base class of configuration tables: immutable, without unknown keys or infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
