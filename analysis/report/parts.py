"""Pieces of HTML that the report's sections are made of."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from html import escape

from analysis.report.charts import Point, Series, number


@dataclass(frozen=True)
class Cell:
    """A table's cell with more to it than its text: CSS classes, HTML in front of the text, words
    behind the pointer.
    """

    text: str
    kind: str = ""
    front: str = ""
    title: str = ""


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


def legend(lines: Sequence[Series], digits: int = 3) -> str:
    """Names with their colour and newest value."""
    items = []
    for line in lines:
        dash = " dash" if line.dashed else ""
        newest = number(_last(line.points), digits)
        items.append(
            f'<li><span class="swatch{dash}'
            f' bg-{line.colour}"></span>{escape(line.label)}<b>{newest}</b></li>'
        )
    return f'<ul class="legend">{"".join(items)}</ul>'


def blocks(parts: Sequence[tuple[str, int, str]]) -> str:
    """A legend's items for areas: (what, colour 1 to 8, a value or nothing)."""
    return "".join(
        '<li><span class="swatch block'
        f' bg-{colour}"></span>{escape(what)}{f"<b>{escape(value)}</b>" if value else ""}</li>'
        for what, colour, value in parts
    )


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str | Cell]],
    words: Container[int] = (0,),
    kind: str = "",
) -> str:
    """A table that scrolls sideways where it must. The columns ``words`` hold words, the others
    numbers.
    """
    numbers = [at not in words for at in range(len(heads))]
    top = "".join(
        f"<th{_attributes('n' if n else '')}>{escape(head)}</th>"
        for head, n in zip(heads, numbers, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(_cell(cell, n) for cell, n in zip(row, numbers, strict=True))}</tr>"
        for row in rows
    )
    return (
        "<div"
        f' class="scroll"><table{_attributes(kind)}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cell(cell: str | Cell, is_number: bool) -> str:
    cell = Cell(cell) if isinstance(cell, str) else cell
    kinds = " ".join(part for part in ("n" if is_number else "", cell.kind) if part)
    return f"<td{_attributes(kinds, cell.title)}>{cell.front}{escape(cell.text)}</td>"


def _attributes(kind: str, title: str = "") -> str:
    said = f' class="{kind}"' if kind else ""
    return said + (f' title="{escape(title, quote=True)}"' if title else "")


def _last(found: Sequence[Point]) -> float | None:
    return next((y for _, y in reversed(found) if math.isfinite(y)), None)
