"""Bar chart of cosines between gradients: a group per objective, a bar per selection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from analysis.report.axes import figure, nice_ticks
from configs.section import Tree

RIGHT, TOP, BAR, GAP, PLOT = 60.0, 64.0, 17.0, 16.0, 550.0
LETTER = 6.0
"""Average width of a letter in pixels at font size 11."""
COLOURS = ("#9aa5b1", "#1f6fb2", "#e08214", "#35978f", "#7b3294", "#a6611a")


def drawing(rows: Sequence[Tree], title: str) -> str:
    """Return an SVG of ``rows`` of signal.json; error bars are one standard error on each side."""
    choices = list(dict.fromkeys(row["choice"] for row in rows))
    names = list(dict.fromkeys(row["objective"] for row in rows))
    ends = [row["cosine"] + side * row["stderr"] for row in rows for side in (-1, 1)]
    low, high = min(0.0, *ends), max(0.05, *ends)
    left = max(150.0, 24 + LETTER * max(map(len, names)))
    width, scale = left + PLOT + RIGHT, PLOT / (high - low)

    def x(value: float) -> float:
        return left + (value - low) * scale

    top = TOP + 16 * len(choices)
    body, y = [], top
    for name in names:
        group = [row for row in rows if row["objective"] == name]
        middle = y + BAR * len(group) / 2
        body.append(
            f'<text x="{left - 8:g}" y="{middle + 4:g}" text-anchor="end">{escape(name)}</text>'
        )
        for row in group:
            body.append(_bar(row, COLOURS[choices.index(row["choice"]) % len(COLOURS)], x, y))
            y += BAR
        y += GAP
    ticks = "".join(
        f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{top - 6:g}" y2="{y:g}" stroke="#ddd"/>'
        f'<text x="{x(tick):.1f}" y="{y + 14:g}" text-anchor="middle">{tick:g}</text>'
        for tick in nice_ticks(low, high, 6)
    )
    head: list[str] = []
    for number, choice in enumerate(choices):
        line = TOP - 12 + 16 * number
        colour = COLOURS[number % len(COLOURS)]
        head.append(
            f'<rect x="16" y="{line:g}" width="12" height="10" fill="{colour}"/>'
            f'<text x="34" y="{line + 9:g}">{escape(choice)}</text>'
        )
    heading = "Signal in a gradient: mean cosine between gradients of independent batches"
    note = f"{title}; bars ± one standard error"
    return figure(width, y + 40, heading, note, [*head, ticks, *body])


def _bar(row: Tree, colour: str, x: Callable[[float], float], y: float) -> str:
    value, error = row["cosine"], row["stderr"]
    left, right, middle = x(min(0.0, value)), x(max(0.0, value)), y + BAR / 2 - 1
    ends = f'x1="{x(value - error):.1f}" x2="{x(value + error):.1f}"'
    return (
        f'<rect x="{left:.1f}" y="{y:g}" width="{max(right - left, 0.5):.1f}" height="{BAR - 3:g}"'
        f' fill="{colour}"/><line {ends} y1="{middle:g}" y2="{middle:g}" stroke="#222"'
        f' stroke-width="1.2"/><text x="{x(max(0.0, value + error)) + 6:.1f}" y="{y + 11:g}">'
        f"{value:.3f}</text>"
    )
