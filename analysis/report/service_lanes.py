"""Lanes of a timeline: those that are drawn, and one for all actors of a service with many.

All times are seconds of running time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from records.timeline import Span, Work

WIDTH, HEIGHT = 1000.0, 10.0
"""Size of the SVG of a lane, in its user units."""
BINS = 250
"""Steps over the width of a service's lane."""
Mark = tuple[float, str, str]
"""(time, tone, text)."""


@dataclass
class Lane:
    """Lane of one actor.

    ``lives`` are the (start, end) periods in which the actor was in service; ``open_since`` is the
    start of a period that has not ended.
    """

    lives: list[tuple[float, float]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    open_since: float | None = None


@dataclass(frozen=True)
class Service:
    """Names of a service's actors: all of them, and those with a lane of their own."""

    name: str
    actors: Sequence[str]
    drawn: Sequence[str]


@dataclass(frozen=True)
class Area:
    """Stepped area in the SVG of a lane; ``kind`` is its CSS class."""

    kind: str
    path: str
    text: str


def chosen_lanes(lanes: Mapping[str, Lane], most: int) -> list[Service]:
    """Return the services of the actors in ``lanes``, in that order, with at most ``most`` lanes.

    Each service has as many lanes as it needs, or an equal share of what small ones leave. Actors
    with marks go first.
    """
    actors: dict[str, list[str]] = {}
    for name in lanes:
        actors.setdefault(name.rpartition("-")[0], []).append(name)
    room, left = {}, most
    for number, (service, names) in enumerate(sorted(actors.items(), key=lambda a: len(a[1]))):
        room[service] = min(len(names), left // (len(actors) - number))
        left -= room[service]
    services = []
    for service, names in actors.items():
        first = set(sorted(names, key=lambda name: not lanes[name].marks)[: room[service]])
        services.append(Service(service, names, [name for name in names if name in first]))
    return services


def areas_of(lanes: Sequence[Lane], spans: Iterable[Span], start: float, stop: float) -> list[Area]:
    """Return areas for the number of actors in service from ``start`` to ``stop``, and of work.

    The height of the lane is the largest number of actors that were in service at once.
    """
    in_service = _binned((life for lane in lanes for life in lane.lives), start, stop)
    top = max(in_service) or 1.0
    total = sum(in_service) or 1.0
    areas = [Area("in-service", _steps([0.0] * BINS, in_service, top), f"at most {top:.0f}")]
    periods: dict[Work, list[tuple[float, float]]] = {}
    for span in spans:
        periods.setdefault(span.display, []).append((span.started, span.ended))
    below = [0.0] * BINS
    for work in sorted(periods, key=lambda work: work.colour):
        busy = _binned(periods[work], start, stop)
        above = [low + height for low, height in zip(below, busy, strict=True)]
        share = f"{work.label}: {100 * sum(busy) / total:.0f} % of the time in service"
        areas.append(Area(f"fill-{work.colour}", _steps(below, above, top), share))
        below = above
    return areas


def merged_marks(marks: Iterable[Sequence[Mark]], gap: float) -> list[Mark]:
    """Return one mark in the place of those of a tone that follow each other within ``gap``."""
    merged: list[Mark] = []
    by_tone = sorted((mark for each in marks for mark in each), key=lambda mark: (mark[1], mark[0]))
    for tone, of_tone in groupby(by_tone, lambda mark: mark[1]):
        near: list[Mark] = []
        for mark in of_tone:
            if near and mark[0] - near[0][0] > gap:
                merged.append(_merged(tone, near))
                near = []
            near.append(mark)
        merged.append(_merged(tone, near))
    return sorted(merged)


def _merged(tone: str, marks: Sequence[Mark]) -> Mark:
    when, _, text = marks[0]
    if len(marks) == 1:
        return when, tone, text
    counts = Counter(text.partition(" (")[0] for _, _, text in marks)
    return when, tone, ", ".join(f"{count} × {text}" for text, count in counts.most_common())


def _binned(periods: Iterable[tuple[float, float]], start: float, stop: float) -> list[float]:
    """Return how many periods cover a bin, on average over its width, for each bin."""
    width = (stop - start) / BINS
    bins = [0.0] * BINS
    if width <= 0:
        return bins
    for begin, end in periods:
        low, high = ((min(max(at, start), stop) - start) / width for at in (begin, end))
        for index in range(int(low), min(int(high) + 1, BINS)):
            bins[index] += max(0.0, min(high, index + 1) - max(low, index))
    return bins


def _steps(below: Sequence[float], above: Sequence[float], top: float) -> str:
    """Return the SVG path of the area between two stepped lines; ``top`` is the full height."""
    width = WIDTH / len(above)

    def line(heights: Sequence[float], back: bool) -> str:
        runs = [(height, len(list(same))) for height, same in groupby(heights)]
        at, path = len(heights) if back else 0, ""
        for height, count in reversed(runs) if back else runs:
            at += -count if back else count
            path += f"V{HEIGHT * (1 - height / top):.2f}H{at * width:.1f}"
        return path

    return f"M0 {HEIGHT:g}{line(above, False)}{line(below, True)}Z"
