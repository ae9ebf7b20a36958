"""Model families: how a diffusers pipeline directory becomes a policy."""

from __future__ import annotations

from configs.schema import Model
from policy.families.base import Family, TextEncoder, model_directory
from policy.families.sd3 import SD3

FAMILIES: dict[str, type[Family]] = {"sd3": SD3}


def family_for(model: Model) -> Family:
    """The family of ``model.family``, with its directory checked. Raises FileNotFoundError or ValueError, one line each."""
    return FAMILIES[model.family](model)


__all__ = ["FAMILIES", "Family", "TextEncoder", "family_for", "model_directory"]
