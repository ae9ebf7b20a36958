"""Extraction of numbers that a model was asked to write after fixed words."""

from __future__ import annotations

import re
from collections.abc import Sequence

NUMBER = r"[\s*]*(-?[0-9]+(?:\.[0-9]+)?)"
"""A number that follows such words, possibly in Markdown bold."""


def numbers_after(
    text: str, marks: Sequence[str], low: float, high: float, ended: bool = True
) -> list[float] | None:
    """Return the number after the last occurrence of each of ``marks``.

    Returns None unless every mark is followed by a number in [low, high]. The last occurrence
    counts because an answer may repeat the question first. ``ended`` is False if the text was cut
    off, perhaps within a number; a number at its very end is then ignored.
    """
    if not ended:
        text = text.rstrip("0123456789.")
    numbers: list[float] = []
    for mark in marks:
        # without the mark there is no number: rpartition would return the whole text
        rest = text.rpartition(mark)[2] if mark in text else ""
        match = re.match(NUMBER, rest)
        if match is None or not low <= float(match[1]) <= high:
            return None
        numbers.append(float(match[1]))
    return numbers
