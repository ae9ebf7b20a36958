"""Model families: adapters from diffusers pipeline directories to policies."""

from __future__ import annotations

from configs.families import FAMILIES as ROWS
from configs.lookup import load_class
from configs.sections import Model
from policy.families.base import Family
from policy.families.files import INDEX, model_directory, pipeline_file

FAMILIES: dict[str, type[Family]] = {name: load_class(row, Family) for name, row in ROWS.items()}


def family_for(model: Model) -> Family:
    """Return the family of ``model``. Raises FileNotFoundError or ValueError with one line."""
    directory = model_directory(model)
    pipeline_class = pipeline_file(directory, INDEX).get("_class_name")
    if pipeline_class not in {family.pipeline_class for family in FAMILIES.values()}:
        known = ", ".join(
            f"{family.pipeline_class} (family {name!r})" for name, family in FAMILIES.items()
        )
        raise ValueError(
            f"model.path: {directory!r} contains a {pipeline_class}; supported are {known}"
        )
    return FAMILIES[model.family](model)
