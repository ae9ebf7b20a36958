"""What the chapters of a page hand to its template: cards, legends and tables as data."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from analysis.report.charts import Point, Series, number

LIGHT = (
    *("#2a78d6", "#1a9e72", "#c98a00", "#5b48b8", "#d9572b", "#cf5f92", "#3b7f1f", "#8a8f98"),
    "#0e8a99",
)
DARK = (
    *("#5a9dee", "#2fb98a", "#d9a12e", "#a497ea", "#ec7a4e", "#e386ad", "#74b553", "#80868f"),
    "#3cb4c3",
)
"""Colours 1 to 9 of charts: blue, aqua, amber, violet, orange, magenta, green, grey, teal."""


@dataclass(frozen=True)
class Item:
    """An entry of a legend; ``swatch`` are CSS classes behind the first."""

    label: str
    swatch: str
    value: str = ""
    style: str = ""


@dataclass(frozen=True)
class Cell:
    """A table's cell: CSS classes, a tooltip, a bar (colour, pixels) in front."""

    text: str
    kind: str = ""
    title: str = ""
    bar: tuple[int, float] | None = None


@dataclass(frozen=True)
class Table:
    """A table whose columns ``words`` hold words and all others numbers."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    words: Container[int] = (0,)
    kind: str = ""
    title: str = ""
    note: str = ""
    none: str = ""  # said in place of a table without rows

    def __post_init__(self) -> None:
        """Raises ValueError for a row of another length than the heads."""
        if any(len(row) != len(self.heads) for row in self.rows):
            raise ValueError(f"a row of {self.title or self.heads} has another length")

    @property
    def head(self) -> list[Cell]:
        """The heads as cells."""
        return self._cells(self.heads)

    @property
    def body(self) -> list[list[Cell]]:
        """The rows as cells."""
        return [self._cells(row) for row in self.rows]

    def _cells(self, row: Sequence[str | Cell]) -> list[Cell]:
        cells = []
        for at, cell in enumerate(row):
            cell = Cell(cell) if isinstance(cell, str) else cell
            kind = cell.kind if at in self.words else f"n {cell.kind}".strip()
            cells.append(Cell(cell.text, kind, cell.title, cell.bar))
        return cells


@dataclass(frozen=True)
class Card:
    """A box: a chart (SVG, escaped already) under its legend, or a table; then small print."""

    title: str
    chart: str = ""
    legend: Sequence[Item] = ()
    table: Table | None = None
    note: str = ""


@dataclass(frozen=True)
class Group:
    """Cards in as many columns as there is room for, or below each other without a ``layout``."""

    cards: Sequence[Card]
    layout: str = "cards"


@dataclass(frozen=True)
class Section:
    """A chapter of a page; ``none`` is said where there are no groups."""

    title: str
    lead: str
    groups: Sequence[Group]
    none: str = ""
    note: str = ""


def legend(lines: Sequence[Series], digits: int = 3) -> list[Item]:
    """Names with their colour and newest value."""
    return [
        Item(
            line.label,
            f"{' dash' if line.dashed else ''} bg-{line.colour}",
            number(_last(line.points), digits),
        )
        for line in lines
    ]


def blocks(parts: Sequence[tuple[str, int, str]]) -> list[Item]:
    """A legend for areas: (what, colour 1 to 9, a value or nothing)."""
    return [Item(what, f" block bg-{colour}", value) for what, colour, value in parts]


def render(template: str, **data: object) -> str:
    """A page as text."""
    return TEMPLATES.get_template(template).render(data, light=LIGHT, dark=DARK)


def _last(found: Sequence[Point]) -> float | None:
    return next((y for _, y in reversed(found) if math.isfinite(y)), None)


TEMPLATES = Environment(
    loader=PackageLoader("analysis"),
    autoescape=True,
    undefined=StrictUndefined,  # a misspelt name is an error, not a gap in a page
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["number"] = number
TEMPLATES.tests["known"] = math.isfinite
