"""Scatter plot of explore settings: strength of the signal against cost."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from analysis.report.axes import Frame, figure, nice_ticks, span
from learner.fidelity import Estimate

WIDTH, PLOT, LINE = 760.0, 380.0, 15.0
COLOURS = ("#9aa5b1", "#1f6fb2", "#d9572b")


def drawing(points: Sequence[tuple[str, float, Estimate, bool]], budget: float, by: str) -> str:
    """Return an SVG of (label, cost, strength, chosen) points, the configuration's own first.

    Bars are 95 % confidence intervals, and the dashed line is the budget. The legend lists the
    points by number.
    """
    xs, means = [cost for _, cost, _, _ in points], [value.mean for _, _, value, _ in points]
    ends = [end for _, _, value, _ in points for end in (value.low, value.high)]
    frame = Frame(WIDTH, PLOT, span(xs, [budget]), span(ends), left=64, top=44, bottom=44)
    height = PLOT + LINE * len(points) + 16
    body = [
        f'<text x="{WIDTH / 2:g}" y="{PLOT - 8:g}" text-anchor="middle">{escape(by)}, over those'
        " of the configuration</text>",
        *_grid(frame),
        f'<line x1="{frame.x(budget):.1f}" x2="{frame.x(budget):.1f}" y1="44" y2="{PLOT - 44:g}"'
        ' stroke="#d9572b" stroke-dasharray="4 3"/>',
    ]
    for number, (label, cost, value, chosen) in enumerate(points):
        colour = COLOURS[2 if chosen else 1 if number == 0 else 0]
        x = frame.x(cost)
        body.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{frame.y(value.low):.1f}"'
            f' y2="{frame.y(value.high):.1f}" stroke="{colour}" stroke-opacity="0.5"/>'
            f'<circle cx="{x:.1f}" cy="{frame.y(means[number]):.1f}" r="4" fill="{colour}"/>'
            f'<text x="{x + 6:.1f}" y="{frame.y(means[number]) + 4:.1f}">{number + 1}</text>'
            f'<text x="16" y="{PLOT + LINE * (number + 1):g}" fill="{colour}">{number + 1}:'
            f" {escape(label)}{' (own)' if number == 0 else ''}</text>"
        )
    note = "contrast x sqrt(keep), 95 % confidence over prompts"
    return figure(WIDTH, height, "Strength against cost", note, body)


def _grid(frame: Frame) -> list[str]:
    lines = []
    for tick in nice_ticks(*frame.x_span, 6):
        x = frame.x(tick)
        lines.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="44" y2="{PLOT - 44:g}" stroke="#eee"/>'
            f'<text x="{x:.1f}" y="{PLOT - 28:g}" text-anchor="middle">{tick:g}</text>'
        )
    for tick in nice_ticks(*frame.y_span, 5):
        y = frame.y(tick)
        lines.append(
            f'<line x1="64" x2="{WIDTH - 12:g}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>'
            f'<text x="58" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    return lines
