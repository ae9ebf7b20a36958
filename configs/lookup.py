"""Look up classes by ``module:class`` and suggest the nearest name for a misspelled one."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def load_class(row: str, base: type[T]) -> type[T]:
    """Return the class that ``module:class`` names. Raises TypeError if it is no ``base``."""
    module, _, name = row.partition(":")
    cls = getattr(importlib.import_module(module), name)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise TypeError(f"{row} is not a {base.__name__}")
    return cls


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" for a misspelled ``word``, or "" if no known name is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
