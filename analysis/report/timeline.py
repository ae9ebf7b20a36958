"""Timeline chart: a lane per actor with its tasks, versions as lines, and faults as marks.

A service with many actors has a lane for all of them, and lanes for some. This module computes
positions, and ``templates/timeline.html`` draws them. All times are seconds of running time, which
excludes the pause before a resume.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from analysis.report.parts import Item, blocks, render
from analysis.report.service_lanes import HEIGHT, WIDTH, Lane, Mark
from analysis.report.tracks import Scale, Track, tracks_of
from records.atomic import write_text
from records.formatting import duration
from records.timeline import Span, Work

MOST_LINES = 60


@dataclass(frozen=True)
class Chart:
    """Input of the drawing; ``marks`` are those of the run, ``versions`` are (time, version)."""

    lanes: Mapping[str, Lane]
    marks: Sequence[Mark]
    versions: Sequence[tuple[float, int]]
    spans: Sequence[Span]
    end: float


@dataclass(frozen=True)
class Tick:
    """Label on a scale; ``left`` is in percent of the width."""

    left: str
    text: str
    last: bool = False  # near the right end: placed to the left of its position


@dataclass(frozen=True)
class Window:
    """Time window of the drawing; ``path`` draws a vertical line per version in every lane."""

    title: str
    versions: Sequence[Tick]
    path: str
    rows: Sequence[Track]
    ruler: Sequence[Tick]
    quiet: bool  # lives are drawn pale, because bars are drawn on top of them
    hidden: int = 0


@dataclass(frozen=True)
class Drawing:
    """Windows of the whole run and, if two or more iterations ended, of the last iteration."""

    legend: Sequence[Item]
    windows: Sequence[Window]


def in_running_time(
    spans: Sequence[Span], moments: Sequence[float], times: Sequence[float]
) -> list[Span]:
    """Convert spans from clock time to running time.

    ``moments`` are the clock times of events, and ``times`` the running times of the same events.
    """
    if not moments:
        return []

    def running_time(moment: float) -> float:
        index = max(0, bisect_right(moments, moment) - 1)
        return max(0.0, times[index] + moment - moments[index])

    moved = [
        span._replace(started=running_time(span.started), ended=running_time(span.ended))
        for span in spans
    ]
    return [span for span in moved if span.ended >= span.started]


def drawing(chart: Chart) -> Drawing:
    """Compute the positions of everything that is drawn."""
    end = max([chart.end, *(span.ended for span in chart.spans)]) or 1.0
    windows = [_window(chart, "", 0.0, end)]
    if last := last_iteration(chart.spans):
        start, stop = last
        title = f"The last iteration: {duration(stop - start)}, after {duration(start)}"
        windows.append(_window(chart, title, start, stop))
    return Drawing(_legend(chart), windows)


def write_page(path: Path, name: str, spans: Sequence[Span], end: float) -> None:
    """Write a standalone page that shows spans from 0 to ``end`` seconds; raises OSError."""
    by_service = attrgetter("service", "actor")
    lanes = {span.who: Lane(lives=[(0.0, end)]) for span in sorted(spans, key=by_service)}
    text = render(
        "plan.html",
        name=name,
        what="plan",
        timeline=drawing(Chart(lanes, [], [], spans, end)),
        seconds=duration(end),
    )
    write_text(path, text)


def last_iteration(spans: Sequence[Span]) -> tuple[float, float] | None:
    """Return the ends of the last two updates, or None if there are fewer.

    Only updates that learner 0 finished count.
    """
    ends = sorted(
        span.ended
        for span in spans
        if span.work == "update" and span.outcome == "done" and span.actor == 0
    )
    return (ends[-2], ends[-1]) if len(ends) > 1 else None


def _window(chart: Chart, title: str, start: float, stop: float) -> Window:
    scale = Scale(start, stop)
    rows, hidden = tracks_of(chart.lanes, chart.spans, scale)
    if marks := scale.dots(scale.marks(chart.marks)):
        rows.insert(0, Track("run", marks=marks))
    published = [(when, version) for when, version in chart.versions if start <= when <= stop]
    lines = _some([when for when, _ in published])
    path = "".join(f"M{scale.place(when) * WIDTH / 100:.1f} 0V{HEIGHT:g}" for when in lines)
    quarter = scale.seconds / 4
    ruler = [
        Tick(str(25 * part), duration(quarter * part) if part else "0") for part in range(0, 5, 2)
    ]
    names = _version_names(published, scale.place)
    return Window(title, names, path, rows, ruler, bool(chart.spans), hidden)


def _some(times: Sequence[float]) -> Sequence[float]:
    """Return at most ``MOST_LINES`` of the times, in even steps, with the first and the last."""
    if len(times) <= MOST_LINES:
        return times
    step = (len(times) - 1) / (MOST_LINES - 1)
    return [times[round(index * step)] for index in range(MOST_LINES)]


def _version_names(
    published: Sequence[tuple[float, int]], place: Callable[[float], float]
) -> list[Tick]:
    """Return labels for the versions, leaving out those that would overlap."""
    ticks, free = [], -1.0
    for when, version in published:
        left = place(when)
        if left >= free:
            ticks.append(Tick(f"{left:.2f}", f"v{version}", left > 96))
            free = left + 6
    return ticks


def _legend(chart: Chart) -> list[Item]:
    """Return the legend of colors, with the total seconds of each kind of work."""
    seconds: dict[Work, float] = {}
    for span in chart.spans:
        seconds[span.display] = seconds.get(span.display, 0.0) + span.ended - span.started
    works = sorted(seconds.items(), key=lambda item: item[0].colour)
    items = blocks([(work.label, work.colour, duration(total)) for work, total in works])
    if chart.spans:
        items.append(Item("in service", " block", style="background:var(--rule)"))
    else:
        items.append(Item("in service", " block bg-1", style="opacity:.5"))
    if chart.versions:
        items.append(Item("policy published", " tall"))
    used = {tone for lane in chart.lanes.values() for _, tone, _ in lane.marks}
    for tone, label in (("bad", "died"), ("good", "replaced or added"), ("warn", "task retried")):
        if tone in used:
            items.append(Item(label, " block", style=f"background:var(--{tone})"))
    if any(span.outcome in ("lost", "failed") for span in chart.spans):
        items.append(Item("work lost", " block lost"))
    return items
