"""Model families, which adapt diffusers pipelines to policies."""

from __future__ import annotations

from configs.families import FAMILIES as ROWS
from configs.named import named_class
from configs.sections import Model
from policy.families.base import Family
from policy.families.files import INDEX, model_directory, pipeline_file

FAMILIES: dict[str, type[Family]] = {name: named_class(row, Family) for name, row in ROWS.items()}


def family_for(model: Model) -> Family:
    """Return the family ``model.family`` of a model.

    Raises FileNotFoundError or ValueError with a message of one line.
    """
    directory = model_directory(model)
    class_name = pipeline_file(directory, INDEX).get("_class_name")
    if class_name not in {family.pipeline_class for family in FAMILIES.values()}:
        known = ", ".join(
            f"{family.pipeline_class} (family {name!r})" for name, family in FAMILIES.items()
        )
        raise ValueError(f"model.path: {directory!r} holds a {class_name}; supported are {known}")
    return FAMILIES[model.family](model)
