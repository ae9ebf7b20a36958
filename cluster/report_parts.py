"""Pieces of HTML that the report's sections are made of."""

from __future__ import annotations

from collections.abc import Container, Sequence
from html import escape

_NUMBERS = '<th class="n">'


def card(title: str, body: str, note: str = "") -> str:
    """A titled box with HTML ``body``, and a remark in small print below it."""
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<div class="card"><h3>{escape(title)}</h3>{body}{below}</div>'


def side_by_side(cards: Sequence[str], small: bool = False) -> str:
    """Cards in as many columns as there is room for."""
    return f'<div class="cards{" small" if small else ""}">{"".join(cards)}</div>'


def nothing(text: str) -> str:
    """Says why a section is empty."""
    return f'<p class="none">{escape(text)}</p>'


def table(heads: Sequence[str], rows: Sequence[str], words: Container[int] = (0,), kind: str = "") -> str:
    """A table that scrolls sideways where it must. ``rows`` are HTML; the columns ``words`` hold words, the others numbers."""
    cells = "".join(f"{'<th>' if at in words else _NUMBERS}{escape(head)}</th>" for at, head in enumerate(heads))
    opening = f'<table class="{kind}">' if kind else "<table>"
    return f'<div class="scroll">{opening}<thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
