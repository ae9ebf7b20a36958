"""Names: the class that a row of a table says, and which name a misspelt one comes near to."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def named_class(row: str, base: type[T]) -> type[T]:
    """The subclass of ``base`` that ``module:class`` names. Raises TypeError for anything else."""
    module, _, name = row.partition(":")
    found = getattr(importlib.import_module(module), name)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise TypeError(f"{row} is no {base.__name__}")
    return found


def nearest(word: str, known: Iterable[str]) -> str:
    """A question to put behind a misspelt ``word``; nothing where no name comes near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
