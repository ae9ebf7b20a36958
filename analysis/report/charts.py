"""Charts as inline SVG: no JavaScript, and colours from CSS, so that light and dark both work.

Every function returns a complete ``<svg>`` element as a string with all text escaped. Coordinates
are user units of a ``viewBox``; the page scales it. Points that are not finite are left out and
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
"""A longer line is thinned to so many points: more cannot be told apart at the width of a page."""
MAX_BARS = 60


@dataclass(frozen=True)
class Series:
    """A line through ``points`` by rising x; ``errors``: half-lengths of bars; colour 1 to 9."""

    label: str
    points: Sequence[Point]
    colour: int = 1
    errors: Sequence[float] = ()
    dashed: bool = False


@dataclass(frozen=True)
class Band:
    """A shaded area between ``low`` and ``high``, both (x, y) at the same x."""

    label: str
    low: Sequence[Point]
    high: Sequence[Point]
    colour: int = 1


@dataclass(frozen=True)
class Stack:
    """A bar: parts by label, and the measured whole (drawn as a tick) where there is one."""

    x: float
    parts: dict[str, float] = field(default_factory=dict)
    whole: float | None = None


def number(value: float | None, digits: int = 3) -> str:
    """``value`` to so many significant digits, without exponent where usual; '–' for nothing."""
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
        # of the rounded value: 0.9996 is 1.00
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
    """Lines over a shared x axis. ``label`` says what is shown, for those who cannot see it."""
    lines = [
        *(one.points for one in series),
        *(edge for band in bands for edge in (band.low, band.high)),
    ]
    xs = [x for points in lines for x, _ in points]
    ys = [y for points in lines for _, y in points]
    for one in series:
        for (_, y), error in zip(one.points, one.errors, strict=False):
            ys += [y - error, y + error]
    frame = Frame(*size, x_span=x_span(xs), y_span=span(ys, include_y))
    body = [axes(frame, x_label, whole_x=all(float(x).is_integer() for x in xs))]
    body += [_band(frame, band) for band in bands]
    body += [_line(frame, one) for one in series]
    return svg(frame, label, body)


def stacked_bars(stacks: Sequence[Stack], order: Sequence[tuple[str, int]], *, label: str) -> str:
    """A bar of seconds per stack, parts from the bottom in ``order``; beyond 60 runs of them are
    averaged.
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
            title = f"iteration {number(stack.x)}: {number(stack.whole)} s by the clock"
            body.append(
                f'<line class="whole" x1="{left - 1:.2f}" x2="{right + 1:.2f}" y1="{y:.2f}"'
                f' y2="{y:.2f}"><title>{escape(title)}</title></line>'
            )
    return svg(frame, label, body)


def scatter(
    pairs: Sequence[Point], *, label: str, x_label: str, y_label: str, names: Sequence[str]
) -> str:
    """Points on equal scales with the diagonal x = y; colours tell those above from those below.

    ``names`` say what each point is.
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


def thin(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """At most ``most`` of the points, evenly spread, first and last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


def _pieces(points: Sequence[Point]) -> list[list[Point]]:
    """The points cut where one is not finite."""
    runs = itertools.groupby(points, lambda point: math.isfinite(point[1]))
    return [list(run) for known, run in runs if known]


def _line(frame: Frame, series: Series) -> str:
    parts, style = [], f"line-{series.colour}" + (" dashed" if series.dashed else "")
    for (x, y), error in zip(series.points, series.errors, strict=False):
        if math.isfinite(y) and math.isfinite(error):
            parts.append(
                f'<line class="error stroke-{series.colour}" x1="{frame.x(x):.2f}"'
                f' x2="{frame.x(x):.2f}" y1="{frame.y(y - error):.2f}"'
                f' y2="{frame.y(y + error):.2f}"/>'
            )
    for piece in _pieces(thin(series.points)):
        if len(piece) > 1:
            path = " ".join(f"{frame.x(x):.2f},{frame.y(y):.2f}" for x, y in piece)
            parts.append(f'<polyline class="{style}" points="{path}"/>')
    finite = [point for point in thin(series.points) if math.isfinite(point[1])]
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
        for low, high in zip(thin(band.low), thin(band.high), strict=True)
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
    """At most ``MAX_BARS`` stacks: each the mean of a run of neighbours, at the first one's x."""
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
