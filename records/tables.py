"""Text tables with aligned columns, for a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

Row = Sequence[str]


def aligned(rows: Sequence[Row], right: bool = False) -> list[str]:
    """Return a line per row, with columns aligned left, or ``right``; rows have equal lengths."""
    return ["  ".join(row).rstrip() for row in _padded(rows, 0 if right else None)]


def markdown(head: Row, body: Sequence[Row], numbers: bool = False) -> list[str]:
    """Return a Markdown table; ``numbers`` aligns all columns but the first to the right."""
    rule = ["--:" if numbers and column else "---" for column in range(len(head))]
    rows = _padded([head, rule, *body], 1 if numbers else None)
    rows[1] = [cell.replace(" ", "-") for cell in rows[1]]
    return [f"| {' | '.join(row)} |" for row in rows]


def _padded(rows: Sequence[Row], right_from: int | None) -> list[list[str]]:
    """Pad every cell to its column's width; columns from ``right_from`` on are aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [
            cell.ljust(width) if right_from is None or position < right_from else cell.rjust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
