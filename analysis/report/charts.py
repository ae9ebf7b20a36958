"""Charts as inline SVG without JavaScript; colors come from CSS, for light and dark mode.

Chart functions return a complete ``<svg>`` element as a string with all text escaped. Coordinates
are user units of a ``viewBox``, which the page scales. Points that are not finite are left out and
break their line, so a gap in the data is a gap in the chart. Values can be read by hovering
(``<title>``) and in the page's table of numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from analysis.report.axes import Frame, axes, span, svg, x_span

Point = tuple[float, float]

SIZE = (400.0, 210.0)
"""Width and height of a chart, in user units."""
MAX_POINTS = 300
"""Maximum number of points of a line; more cannot be distinguished at the width of a page."""
MAX_BARS = 60


@dataclass(frozen=True)
class Series:
    """Line through ``points`` with ascending x.

    ``errors`` are half-lengths of error bars; ``colour`` is 1 to 9.
    """

    label: str
    points: Sequence[Point]
    colour: int = 1
    errors: Sequence[float] = ()
    dashed: bool = False


@dataclass(frozen=True)
class Band:
    """Shaded area between ``low`` and ``high``, which are (x, y) points at the same x."""

    label: str
    low: Sequence[Point]
    high: Sequence[Point]
    colour: int = 1


@dataclass(frozen=True)
class Stack:
    """Stacked bar: parts by label, and optionally the measured total, which is drawn as a tick."""

    x: float
    parts: dict[str, float] = field(default_factory=dict)
    whole: float | None = None


def number(value: float | None, digits: int = 3) -> str:
    """Format ``value`` with ``digits`` significant digits, or return '–' if it is missing.

    An exponent is used only below 1e-4 and from 1e6 on.
    """
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-4:
        text = f"{size:.{digits - 1}e}"
    elif size >= 10**digits or float(value).is_integer():
        text = f"{size:,.0f}"
    else:
        # exponent of the rounded value: 0.9996 becomes 1.00
        power = int(f"{size:.{digits - 1}e}".partition("e")[2])
        text = f"{size:.{max(0, digits - 1 - power)}f}"
    return ("−" if value < 0 else "") + text


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    bands: Sequence[Band] = (),
    include_y: Sequence[float] = (),
    x_label: str = "iteration",
    size: tuple[float, float] = SIZE,
) -> str:
    """Draw lines over a shared x axis; ``label`` is the text for screen readers."""
    lines = [
        *(line.points for line in series),
        *(edge for band in bands for edge in (band.low, band.high)),
    ]
    xs = [x for points in lines for x, _ in points]
    ys = [y for points in lines for _, y in points]
    for line in series:
        for (_, y), error in zip(line.points, line.errors, strict=False):
            ys += [y - error, y + error]
    frame = Frame(*size, x_span=x_span(xs), y_span=span(ys, include_y))
    body = [axes(frame, x_label, whole_x=all(float(x).is_integer() for x in xs))]
    body += [_band(frame, band) for band in bands]
    body += [_line(frame, line) for line in series]
    return svg(frame, label, body)


def stacked_bars(stacks: Sequence[Stack], order: Sequence[tuple[str, int]], *, label: str) -> str:
    """Draw a bar of seconds per stack, with the parts from bottom to top in ``order``.

    More than ``MAX_BARS`` stacks are reduced by averaging neighbors.
    """
    stacks = _averaged(stacks)
    tops = [
        max(sum(_positive(stack.parts.get(name)) for name, _ in order), _positive(stack.whole))
        for stack in stacks
    ]
    half = _bar_half_width([stack.x for stack in stacks])
    xs = [edge for stack in stacks for edge in (stack.x - half * 1.25, stack.x + half * 1.25)]
    frame = Frame(*SIZE, x_span=span(xs, pad=0), y_span=span(tops, include=(0.0,)))
    body = [axes(frame, "iteration", whole_x=True, unit="s")]
    for stack in stacks:
        left, right, level = frame.x(stack.x - half), frame.x(stack.x + half), 0.0
        for name, colour in order:
            value = _positive(stack.parts.get(name))
            if value == 0:
                continue
            top, foot = frame.y(level + value), frame.y(level)
            title = f"iteration {number(stack.x)}: {name} {number(value)} s"
            body.append(
                f'<rect class="fill-{colour}" x="{left:.2f}" y="{top:.2f}"'
                f' width="{right - left:.2f}"'
                f' height="{max(0.0, foot - top - 0.6):.2f}"><title>{escape(title)}</title></rect>'
            )
            level += value
        if stack.whole is not None and math.isfinite(stack.whole):
            y = frame.y(stack.whole)
            title = f"iteration {number(stack.x)}: {number(stack.whole)} s wall-clock time"
            body.append(
                f'<line class="whole" x1="{left - 1:.2f}" x2="{right + 1:.2f}" y1="{y:.2f}"'
                f' y2="{y:.2f}"><title>{escape(title)}</title></line>'
            )
    return svg(frame, label, body)


def scatter(
    pairs: Sequence[Point], *, label: str, x_label: str, y_label: str, names: Sequence[str]
) -> str:
    """Draw points on equal scales with the diagonal x = y, in one color above it and one below.

    ``names`` holds the label of each point.
    """
    named = zip(pairs, names, strict=True)
    finite = [(x, y, name) for (x, y), name in named if math.isfinite(x + y)]
    both = span([value for x, y, _ in finite for value in (x, y)])
    frame = Frame(*SIZE, x_span=both, y_span=both)
    body = [
        axes(frame, x_label, whole_x=False, y_label=y_label),
        (
            f'<line class="diagonal" x1="{frame.x(both[0]):.2f}" y1="{frame.y(both[0]):.2f}"'
            f' x2="{frame.x(both[1]):.2f}" y2="{frame.y(both[1]):.2f}"/>'
        ),
    ]
    for x, y, name in finite:
        title = f"{name}: {number(x)} → {number(y)}"
        body.append(
            f'<circle class="point fill-{2 if y > x else 5 if y < x else 8}" cx="{frame.x(x):.2f}"'
            f' cy="{frame.y(y):.2f}" r="3.2"><title>{escape(title)}</title></circle>'
        )
    return svg(frame, label, body)


def downsample(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Return at most ``most`` evenly spaced points, including the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


def _pieces(points: Sequence[Point]) -> list[list[Point]]:
    """Split the points into runs of finite values."""
    runs = itertools.groupby(points, lambda point: math.isfinite(point[1]))
    return [list(run) for finite, run in runs if finite]


def _line(frame: Frame, series: Series) -> str:
    parts, style = [], f"line-{series.colour}" + (" dashed" if series.dashed else "")
    for (x, y), error in zip(series.points, series.errors, strict=False):
        if math.isfinite(y) and math.isfinite(error):
            parts.append(
                f'<line class="error stroke-{series.colour}" x1="{frame.x(x):.2f}"'
                f' x2="{frame.x(x):.2f}" y1="{frame.y(y - error):.2f}"'
                f' y2="{frame.y(y + error):.2f}"/>'
            )
    for piece in _pieces(downsample(series.points)):
        if len(piece) > 1:
            path = " ".join(f"{frame.x(x):.2f},{frame.y(y):.2f}" for x, y in piece)
            parts.append(f'<polyline class="{style}" points="{path}"/>')
    finite = [point for point in downsample(series.points) if math.isfinite(point[1])]
    visible = len(finite) <= 32 or not any(len(piece) > 1 for piece in _pieces(finite))
    for x, y in finite:
        mark, radius = ("dot", 2.4) if visible else ("dot far", 4)
        title = f"{series.label}, {number(x)}: {number(y, 4)}"
        parts.append(
            f'<circle class="{mark} fill-{series.colour}" cx="{frame.x(x):.2f}"'
            f' cy="{frame.y(y):.2f}" r="{radius:g}">'
            f"<title>{escape(title)}</title></circle>"
        )
    return "".join(parts)


def _band(frame: Frame, band: Band) -> str:
    pairs = [
        (low, high)
        for low, high in zip(downsample(band.low), downsample(band.high), strict=True)
        if math.isfinite(low[1]) and math.isfinite(high[1])
    ]
    if not pairs:
        return ""
    ring = [high for _, high in pairs] + [low for low, _ in reversed(pairs)]
    path = " ".join(f"{frame.x(x):.2f},{frame.y(y):.2f}" for x, y in ring)
    return (
        f'<polygon class="band fill-{band.colour}"'
        f' points="{path}"><title>{escape(band.label)}</title></polygon>'
    )


def _positive(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) and value > 0 else 0.0


def _bar_half_width(xs: Sequence[float]) -> float:
    steps = [after - before for before, after in zip(xs, xs[1:], strict=False) if after > before]
    return 0.38 * min(steps, default=1.0)


def _averaged(stacks: Sequence[Stack]) -> list[Stack]:
    """Return at most ``MAX_BARS`` stacks, each the mean of neighbors at the x of the first."""
    every = math.ceil(len(stacks) / MAX_BARS)
    if every <= 1:
        return list(stacks)
    result = []
    for start in range(0, len(stacks), every):
        run = stacks[start : start + every]
        names = {name for stack in run for name in stack.parts}
        wholes = [
            stack.whole for stack in run if stack.whole is not None and math.isfinite(stack.whole)
        ]
        parts = {
            name: sum(_positive(stack.parts.get(name)) for stack in run) / len(run)
            for name in names
        }
        result.append(Stack(run[0].x, parts, sum(wholes) / len(wholes) if wholes else None))
    return result
