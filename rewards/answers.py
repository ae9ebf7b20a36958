"""A number in what a model wrote, where its prompt asked for it behind some words."""

from __future__ import annotations

import re
from collections.abc import Sequence

NUMBER = r"[\s*]*(-?[0-9]+(?:\.[0-9]+)?)"
"""A number behind such words, which may be in bold."""


def numbers_after(
    text: str, marks: Sequence[str], low: float, high: float, ended: bool = True
) -> list[float] | None:
    """The number behind the last of each mark, or None unless each has one in [low, high].

    The last one: what was asked may be repeated before the answer. ``ended``: False where the text
    was cut off, perhaps within a number, which then does not count.
    """
    if not ended:
        text = text.rstrip("0123456789.")
    found: list[float] = []
    for mark in marks:
        # what stands before a mark is not part of its number
        rest = text.rpartition(mark)[2] if mark in text else ""
        number = re.match(NUMBER, rest)
        if number is None or not low <= float(number[1]) <= high:
            return None
        found.append(float(number[1]))
    return found
