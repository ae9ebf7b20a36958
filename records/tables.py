"""Tables of text, their columns in line: for a terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

Row = Sequence[str]


def aligned(rows: Sequence[Row], right: bool = False) -> list[str]:
    """A line per row, all of which have as many cells; to the left, or to the ``right``."""
    return ["  ".join(row).rstrip() for row in _padded(rows, 0 if right else None)]


def markdown(head: Row, body: Sequence[Row], numbers: bool = False) -> list[str]:
    """The same as Markdown; ``numbers``: all columns but the first are to the right."""
    rule = ["--:" if numbers and at else "---" for at in range(len(head))]
    rows = _padded([head, rule, *body], 1 if numbers else None)
    rows[1] = [cell.replace(" ", "-") for cell in rows[1]]
    return [f"| {' | '.join(row)} |" for row in rows]


def _padded(rows: Sequence[Row], right_from: int | None) -> list[list[str]]:
    """Every cell as wide as its column; columns from ``right_from`` on are to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [
            cell.ljust(width) if right_from is None or at < right_from else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
