"""Tables of text, their columns in line: for a terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

Row = Sequence[str]


def aligned(rows: Sequence[Row], right: bool = False) -> list[str]:
    """A line per row, all of which have as many cells; to the left, or to the ``right``."""
    return [
        "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width in row).rstrip()
        for row in _measured(rows)
    ]


def markdown(head: Row, body: Sequence[Row]) -> list[str]:
    """The same as Markdown, which wants three dashes at least below the head."""
    rule = ["-" * max(3, *(len(row[at]) for row in (head, *body))) for at in range(len(head))]
    return [
        "| " + " | ".join(cell.ljust(width) for cell, width in row) + " |"
        for row in _measured([head, rule, *body])
    ]


def _measured(rows: Sequence[Row]) -> list[list[tuple[str, int]]]:
    """Every cell with its column's width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [list(zip(row, widths, strict=True)) for row in rows]
