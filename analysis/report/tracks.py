"""Lanes of a timeline as they are drawn: positions on the time axis of a window.

All times are seconds of running time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from analysis.report.service_lanes import (
    WIDTH,
    Area,
    Lane,
    Mark,
    Service,
    areas_of,
    chosen_lanes,
    merged_marks,
)
from records.formatting import duration
from records.timeline import Span

MOST_LANES, MOST_MARKS, MOST_BARS = 40, 120, 6000


@dataclass(frozen=True)
class Dot:
    """Mark in a lane; ``left`` is in percent of the width."""

    left: str
    tone: str
    text: str


@dataclass(frozen=True)
class Box:
    """Bar in the SVG of a lane, in user units."""

    kind: str
    left: str
    width: str
    text: str


@dataclass(frozen=True)
class Track:
    """Lane as drawn; ``lives`` are (left, width) in percent. A service's lane has ``areas``."""

    name: str
    lives: Sequence[tuple[str, str]] = ()
    bars: Sequence[Box] = ()
    marks: Sequence[Dot] = ()
    areas: Sequence[Area] = ()


@dataclass(frozen=True)
class Bar:
    """``count`` adjacent spans of the same kind and outcome, drawn as one bar."""

    span: Span
    start: float
    stop: float
    count: int = 1


@dataclass(frozen=True)
class Scale:
    """Time axis of a window, from ``start`` to ``stop``."""

    start: float
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start

    def place(self, moment: float) -> float:
        """Return the position in percent of the width, clipped to 0 to 100."""
        return 100 * min(1.0, max(0.0, (moment - self.start) / (self.seconds or 1.0)))

    def shows(self, begin: float, end: float) -> bool:
        """Return True if part of a period is in the window."""
        return begin < self.stop and end > self.start

    def marks(self, marks: Sequence[Mark]) -> list[Mark]:
        """Return the marks in the window."""
        return [mark for mark in marks if self.start <= mark[0] <= self.stop]

    def dots(self, marks: Sequence[Mark]) -> list[Dot]:
        """Return marks as drawn."""
        return [
            Dot(f"{self.place(when):.2f}", tone, f"{duration(when)}: {text}")
            for when, tone, text in marks
        ]


def tracks_of(
    lanes: Mapping[str, Lane], spans: Iterable[Span], scale: Scale
) -> tuple[list[Track], int]:
    """Return the lanes of actors in the window, and the number of actors without one."""
    lanes = {
        name: lane for name, lane in lanes.items() if any(scale.shows(*life) for life in lane.lives)
    }
    by_actor: dict[str, list[Span]] = {}
    for span in spans:
        if scale.shows(span.started, span.ended):
            by_actor.setdefault(span.who, []).append(span)
    services = chosen_lanes(lanes, MOST_LANES)
    drawn = sum(len(service.drawn) for service in services)
    gap = scale.seconds * max(1 / 700, drawn / MOST_BARS)
    rows = list[Track]()
    for service in services:
        if service.drawn != service.actors:
            rows.append(_service_track(service, lanes, by_actor, scale))
        for name in service.drawn:
            bars = bars_of(by_actor.get(name, []), gap)
            rows.append(_actor_track(name, lanes[name], bars, scale))
    return rows, len(lanes) - drawn


def _actor_track(name: str, lane: Lane, bars: Sequence[Bar], scale: Scale) -> Track:
    places = [(scale.place(a), scale.place(b)) for a, b in lane.lives if scale.shows(a, b)]
    lives = [(f"{left:.2f}", f"{right - left:.2f}") for left, right in places]
    dots = scale.dots(scale.marks(lane.marks)[:MOST_MARKS])
    return Track(name, lives, [_box(bar, scale.place) for bar in bars], dots)


def _service_track(
    service: Service,
    lanes: Mapping[str, Lane],
    by_actor: Mapping[str, Sequence[Span]],
    scale: Scale,
) -> Track:
    """Return the lane of all actors of a service."""
    own = [lanes[name] for name in service.actors]
    spans = [span for name in service.actors for span in by_actor.get(name, [])]
    marks = merged_marks([scale.marks(lane.marks) for lane in own], scale.seconds / 100)
    areas = areas_of(own, spans, scale.start, scale.stop)
    name = f"{service.name}, all {len(service.actors):,}"
    return Track(name, marks=scale.dots(marks), areas=areas)


def bars_of(spans: Sequence[Span], gap: float) -> list[Bar]:
    """Return the bars of a lane from spans sorted by start.

    Adjacent spans of the same kind and outcome are merged if less than ``gap`` seconds apart.
    """
    bars: list[Bar] = []
    for span in spans:
        last = bars[-1] if bars else None
        same = last is not None and (last.span.display, last.span.outcome) == (
            span.display,
            span.outcome,
        )
        if last is not None and same and span.started - last.stop < gap:
            bars[-1] = Bar(last.span, last.start, max(last.stop, span.ended), last.count + 1)
        else:
            bars.append(Bar(span, span.started, span.ended))
    return bars


def _box(bar: Bar, place: Callable[[float], float]) -> Box:
    left, right = (place(moment) * WIDTH / 100 for moment in (bar.start, bar.stop))
    kind = "lost" if bar.span.outcome in ("lost", "failed") else f"fill-{bar.span.display.colour}"
    return Box(kind, f"{left:.1f}", f"{max(right - left, 0.8):.1f}", _what(bar))


def _what(bar: Bar) -> str:
    span = bar.span
    when = f"{duration(bar.start)} to {duration(bar.stop)}"
    if bar.count > 1:
        return f"{bar.count} × {span.display.label}: {when}"
    which = "/".join(str(part) for part in span.unit)
    version = "" if span.version is None else f", version {span.version}"
    ending = "" if span.outcome == "done" else f", {span.outcome}"
    attempt = f", attempt {span.attempt + 1}" if span.attempt else ""
    return f"{span.work} {which}{version}{attempt}: {when}{ending}"
