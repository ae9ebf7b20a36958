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
from analysis.report.bins import Bin, bin_means, bin_size, bins

Point = tuple[float, float]

SIZE = (400.0, 210.0)
"""Width and height of a chart, in user units."""
MAX_BARS = 60
"""Maximum number of bars; more error bars are drawn as a shaded area."""


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
    """Draw lines over a shared x axis; ``label`` is the text for screen readers.

    A point of a long line is the mean of several, which the label of the x axis says. Their range
    is shaded, unless the line has errors or the chart has bands.
    """
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
    binned = [line for line in series if bin_size(len(line.points)) > 1]
    if binned:
        x_label += f", means of {max(bin_size(len(line.points)) for line in binned):,}"
    ranges = [_range(line) for line in binned if not line.errors] if not bands else []
    if ranges:
        x_label += " and their range"
    errors = [band for line in series if (band := _error_band(line))]
    body = [axes(frame, x_label, whole_x=all(float(x).is_integer() for x in xs))]
    body += [_band(frame, band) for band in [*bands, *ranges, *errors]]
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


def _range(series: Series) -> Band:
    """Return the area from the lowest to the highest value in every bin of the line."""
    found = bins(series.points)
    low, high = ([(part.x, getattr(part, edge)) for part in found] for edge in ("low", "high"))
    return Band(f"{series.label}: lowest to highest", low, high, series.colour)


def _error_band(series: Series) -> Band | None:
    """Return the area of one error to either side, or None if the errors are few: then as bars."""
    if len(series.errors) <= MAX_BARS:
        return None
    points = [(part.x, part.y) for part in bins(series.points)]
    errors = bin_means(series.errors)
    low, high = (
        [(x, y + side * error) for (x, y), error in zip(points, errors, strict=True)]
        for side in (-1, 1)
    )
    return Band(f"{series.label}: one standard error", low, high, series.colour)


def _pieces(found: Sequence[Bin]) -> list[list[Bin]]:
    """Split the bins into runs of finite values."""
    runs = itertools.groupby(found, lambda part: math.isfinite(part.y))
    return [list(run) for finite, run in runs if finite]


def _line(frame: Frame, series: Series) -> str:
    parts, style = [], f"line-{series.colour}" + (" dashed" if series.dashed else "")
    bars = series.errors if len(series.errors) <= MAX_BARS else ()
    for (x, y), error in zip(series.points, bars, strict=False):
        if math.isfinite(y) and math.isfinite(error):
            parts.append(
                f'<line class="error stroke-{series.colour}" x1="{frame.x(x):.2f}"'
                f' x2="{frame.x(x):.2f}" y1="{frame.y(y - error):.2f}"'
                f' y2="{frame.y(y + error):.2f}"/>'
            )
    found = bins(series.points)
    for piece in _pieces(found):
        if len(piece) > 1:
            path = " ".join(f"{frame.x(part.x):.2f},{frame.y(part.y):.2f}" for part in piece)
            parts.append(f'<polyline class="{style}" points="{path}"/>')
    finite = [part for part in found if math.isfinite(part.y)]
    visible = len(finite) <= 32 or not any(len(piece) > 1 for piece in _pieces(finite))
    for part in finite:
        mark, radius = ("dot", 2.4) if visible else ("dot far", 4)
        parts.append(
            f'<circle class="{mark} fill-{series.colour}" cx="{frame.x(part.x):.2f}"'
            f' cy="{frame.y(part.y):.2f}" r="{radius:g}">'
            f"<title>{escape(_title(series.label, part))}</title></circle>"
        )
    return "".join(parts)


def _title(label: str, part: Bin) -> str:
    if part.single:
        return f"{label}, {number(part.x)}: {number(part.y, 4)}"
    return (
        f"{label}, {number(part.first)} to {number(part.last)}: mean {number(part.y, 4)}, from"
        f" {number(part.low, 4)} to {number(part.high, 4)}"
    )


def _band(frame: Frame, band: Band) -> str:
    pairs = [
        (low, high)
        for low, high in zip(bins(band.low), bins(band.high), strict=True)
        if math.isfinite(low.y) and math.isfinite(high.y)
    ]
    if not pairs:
        return ""
    ring = [high for _, high in pairs] + [low for low, _ in reversed(pairs)]
    path = " ".join(f"{frame.x(part.x):.2f},{frame.y(part.y):.2f}" for part in ring)
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
