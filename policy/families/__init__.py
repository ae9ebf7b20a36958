"""Model families: how a diffusers pipeline directory becomes a policy."""

from __future__ import annotations

import importlib

from configs.families import FAMILIES as ROWS
from configs.sections import Model
from policy.families.base import INDEX, Family, TextEncoder, model_directory, pipeline_file


def _class_of(row: str) -> type[Family]:
    module, _, name = row.partition(":")
    return getattr(importlib.import_module(module), name)


FAMILIES: dict[str, type[Family]] = {name: _class_of(row) for name, row in ROWS.items()}


def family_for(model: Model) -> Family:
    """The family of ``model.family``, with its directory checked. Raises FileNotFoundError or
    ValueError, one line each.
    """
    directory = model_directory(model)
    found = pipeline_file(directory, INDEX).get("_class_name")
    if found not in {family.pipeline_class for family in FAMILIES.values()}:
        known = ", ".join(
            f"{family.pipeline_class} (family {name!r})" for name, family in FAMILIES.items()
        )
        raise ValueError(f"model.path: {directory!r} holds a {found}; supported are {known}")
    return FAMILIES[model.family](model)


__all__ = ["FAMILIES", "Family", "TextEncoder", "family_for", "model_directory"]
