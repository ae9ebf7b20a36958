"""Data that the sections of a page pass to its template: cards, legends and tables."""

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
"""Colors 1 to 9 of charts: blue, aqua, amber, violet, orange, magenta, green, gray, teal."""


@dataclass(frozen=True)
class Item:
    """Entry of a legend; ``swatch`` holds additional CSS classes and ``style`` inline CSS."""

    label: str
    swatch: str
    value: str = ""
    style: str = ""


@dataclass(frozen=True)
class Cell:
    """Cell of a table: ``kind`` is its CSS classes, ``title`` its tooltip.

    ``bar`` is the (color, width in pixels) of a bar in front of the text.
    """

    text: str
    kind: str = ""
    title: str = ""
    bar: tuple[int, float] | None = None


@dataclass(frozen=True)
class Table:
    """Table in which the columns ``words`` contain text and all others numbers."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    words: Container[int] = (0,)
    kind: str = ""
    title: str = ""
    note: str = ""
    none: str = ""  # text shown instead of a table without rows

    def __post_init__(self) -> None:
        """Raise ValueError if a row has a different length than the heads."""
        if any(len(row) != len(self.heads) for row in self.rows):
            raise ValueError(f"a row of {self.title or self.heads} has another length")

    @property
    def head(self) -> list[Cell]:
        """Heads as cells."""
        return self._cells(self.heads)

    @property
    def body(self) -> list[list[Cell]]:
        """Rows as cells."""
        return [self._cells(row) for row in self.rows]

    def _cells(self, row: Sequence[str | Cell]) -> list[Cell]:
        cells = []
        for column, cell in enumerate(row):
            cell = Cell(cell) if isinstance(cell, str) else cell
            kind = cell.kind if column in self.words else f"n {cell.kind}".strip()
            cells.append(Cell(cell.text, kind, cell.title, cell.bar))
        return cells


@dataclass(frozen=True)
class Card:
    """Box with a chart (escaped SVG) below its legend, or a table, and a note in small print."""

    title: str
    chart: str = ""
    legend: Sequence[Item] = ()
    table: Table | None = None
    note: str = ""


@dataclass(frozen=True)
class Group:
    """Cards in as many columns as fit, or stacked if ``layout`` is empty."""

    cards: Sequence[Card]
    layout: str = "cards"


@dataclass(frozen=True)
class Section:
    """Section of a page; ``none`` is the text shown if there are no groups."""

    title: str
    lead: str
    groups: Sequence[Group]
    none: str = ""
    note: str = ""


def legend(lines: Sequence[Series], digits: int = 3) -> list[Item]:
    """Return a legend with the name, color and newest finite value of each line."""
    return [
        Item(
            line.label,
            f"{' dash' if line.dashed else ''} bg-{line.colour}",
            number(_last(line.points), digits),
        )
        for line in lines
    ]


def blocks(parts: Sequence[tuple[str, int, str]]) -> list[Item]:
    """Return a legend for areas, given as (name, color 1 to 9, value or "")."""
    return [Item(name, f" block bg-{colour}", value) for name, colour, value in parts]


def render(template: str, **data: object) -> str:
    """Render a template as text."""
    return TEMPLATES.get_template(template).render(data, light=LIGHT, dark=DARK)


def _last(points: Sequence[Point]) -> float | None:
    return next((y for _, y in reversed(points) if math.isfinite(y)), None)


TEMPLATES = Environment(
    loader=PackageLoader("analysis"),
    autoescape=True,
    undefined=StrictUndefined,  # a misspelled name raises an error instead of leaving a gap
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["number"] = number
TEMPLATES.tests["known"] = math.isfinite
