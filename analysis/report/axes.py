"""SVG axes of charts: mapping from data to coordinates, round ticks, and grid lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

LARGEST, SMALLEST = 1e300, 1e-300
"""Largest value that is drawn, and the tick step above which more than one tick is drawn.

The difference of larger values may overflow; the power of ten of a smaller step may underflow.
"""


@dataclass(frozen=True)
class Frame:
    """Plot area and the data range that it spans; ``x`` and ``y`` map data to SVG user units."""

    width: float
    height: float
    x_span: tuple[float, float]
    y_span: tuple[float, float]
    left: float = 46.0
    right: float = 12.0
    top: float = 10.0
    bottom: float = 34.0

    def x(self, value: float) -> float:
        low, high = self.x_span
        return self.left + (value - low) / (high - low) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        low, high = self.y_span
        return (
            self.height
            - self.bottom
            - (value - low) / (high - low) * (self.height - self.top - self.bottom)
        )


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about ``count`` multiples of a round step inside [low, high].

    The step is 1, 2, 2.5, 5 or 10 times a power of ten.
    """
    raw = (high - low) / max(1, count)
    if not raw > SMALLEST:
        return [low]
    exponent = math.floor(math.log10(raw))
    power = 10.0**exponent
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    # tolerate rounding errors, so that an end of the interval can be a tick
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    # enough digits for the step: the KL of a first iteration may be 1e-15, and 12 would give zero
    digits = max(12, 4 - exponent)
    return [round(index * step, digits) for index in range(first, last + 1)]


def span(
    values: Sequence[float], include: Sequence[float] = (), pad: float = 0.06
) -> tuple[float, float]:
    """Return a non-empty interval that contains all finite ``values`` and ``include``.

    An end is padded by ``pad`` times the length unless it is in ``include``. Values beyond
    ``LARGEST`` are ignored.
    """
    finite = [value for value in values if abs(value) < LARGEST]
    everything = finite + list(include)
    if not everything:
        return 0.0, 1.0
    low, high = min(everything), max(everything)
    if low == high == 0:
        return 0.0, 1.0
    if low == high:
        room = abs(low) * 0.1 or 0.5
        return low - room, high + room
    room = (high - low) * pad
    return (low if low in include else low - room), (high if high in include else high + room)


def x_span(xs: Sequence[float]) -> tuple[float, float]:
    """Return the interval of an x axis; a single value is centered."""
    if xs and min(xs) == max(xs):
        return xs[0] - 0.5, xs[0] + 0.5
    return span(xs, pad=0.02)


def svg(frame: Frame, label: str, body: Sequence[str]) -> str:
    """Return an SVG element with the given ``body``, whose text must already be escaped."""
    return Markup(
        f'<svg class="chart" viewBox="0 0 {frame.width:g} {frame.height:g}" role="img"'
        f' aria-label="{escape(label, quote=True)}">' + "".join(body) + "</svg>"
    )


def figure(
    width: float, height: float, title: str, note: str, body: Sequence[str], left: float = 16.0
) -> str:
    """Return a standalone SVG file: ``body``, already escaped, below a title and a note."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"'
        f' width="{width:g}" height="{height:g}" font-family="system-ui, sans-serif"'
        ' font-size="11" fill="#222">',
        f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>',
        f'<text x="{left:g}" y="20" font-size="14" font-weight="600">{escape(title)}</text>',
        f'<text x="{left:g}" y="38">{escape(note)}</text>',
    ]
    return "\n".join([*lines, *body, "</svg>"]) + "\n"


def axes(frame: Frame, x_label: str, whole_x: bool, unit: str = "", y_label: str = "") -> str:
    """Return grid lines with their values, and the x axis.

    With ``whole_x``, x ticks are placed at whole numbers only.
    """
    parts, right, foot = [], frame.width - frame.right, frame.height - frame.bottom
    y_ticks = nice_ticks(*frame.y_span, count=6 if frame.height > 180 else 4)
    step = y_ticks[1] - y_ticks[0] if len(y_ticks) > 1 else abs(y_ticks[0]) or 1.0
    for tick in y_ticks:
        y = frame.y(tick)
        parts.append(
            f'<line class="grid" x1="{frame.left:g}" x2="{right:g}" y1="{y:.2f}" y2="{y:.2f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{frame.left - 6:g}" y="{y:.2f}" dy="0.35em"'
            f' text-anchor="end">{_tick(tick, step)}{unit and " " + unit}</text>'
        )
    ticks = nice_ticks(*frame.x_span, count=6)
    gap = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    for tick in [tick for tick in ticks if not whole_x or float(tick).is_integer()]:
        anchor = "end" if frame.x(tick) > right - 8 else "middle"
        parts.append(
            f'<text class="tick" x="{frame.x(tick):.2f}" y="{foot + 14:g}"'
            f' text-anchor="{anchor}">{_tick(tick, 1.0 if whole_x else gap)}</text>'
        )
    if y_label:
        parts.append(
            f'<text class="tick" x="{frame.left + 4:g}" y="{frame.top + 4:g}">{escape(y_label)}'
            " ↑</text>"
        )
    parts.append(
        f'<line class="axis" x1="{frame.left:g}" x2="{right:g}" y1="{foot:g}" y2="{foot:g}"/>'
    )
    parts.append(
        f'<text class="tick" x="{(frame.left + right) / 2:g}" y="{frame.height - 4:g}"'
        f' text-anchor="middle">{escape(x_label)}</text>'
    )
    return "".join(parts)


def _tick(value: float, step: float) -> str:
    """Format a tick with as many decimals as the distance between ticks requires."""
    if value and (abs(value) >= 1e6 or abs(step) < 1e-4):
        return f"{value:.1e}".replace("-", "−").replace("e−0", "e−").replace("e+0", "e")
    decimals = max(0, -math.floor(math.log10(abs(step)) + 1e-9))
    while decimals < 6 and abs(round(step, decimals) - step) > abs(step) * 1e-6:
        decimals += 1
    return f"{value:,.{decimals}f}".replace("-", "−")
