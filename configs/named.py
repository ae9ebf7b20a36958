"""Classes by name: what a row of a table of extensions says."""

from __future__ import annotations

import importlib
from typing import TypeVar

T = TypeVar("T")


def named_class(row: str, base: type[T]) -> type[T]:
    """The subclass of ``base`` that ``module:class`` names. Raises TypeError for anything else."""
    module, _, name = row.partition(":")
    found = getattr(importlib.import_module(module), name)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise TypeError(f"{row} is no {base.__name__}")
    return found
