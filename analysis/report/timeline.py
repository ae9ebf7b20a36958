"""The timeline as a picture: a lane per actor with what it had in hand, versions as lines, faults
and scaling as marks.

Lanes are HTML, so that names stay readable on a phone; what an actor did is an SVG of its lane,
stretched to the width there is. All times are seconds of running time: a pause before a resume
takes none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape

from analysis.report.charts import thin
from records.progress import duration
from records.timeline import Span, Work

MOST_LANES, MOST_MARKS, MOST_LINES, MOST_BARS = 40, 120, 60, 6000
WIDTH, HEIGHT = 1000.0, 10.0
"""Of a lane's drawing, in its own units."""
Mark = tuple[float, str, str]
"""When, tone, text."""


@dataclass
class Lane:
    """One actor: lives as (from, to) and marks, all in seconds of running time."""

    lives: list[tuple[float, float]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    open_since: float | None = None


@dataclass(frozen=True)
class Bar:
    """``count`` neighbouring spans of one kind and outcome."""

    span: Span
    start: float
    stop: float
    count: int = 1


@dataclass(frozen=True)
class Timeline:
    """What is drawn: lanes by actor, the run's own marks, (when, version) of every publication, and
    spans in running time.
    """

    lanes: Mapping[str, Lane]
    marks: Sequence[Mark]
    versions: Sequence[tuple[float, int]]
    spans: Sequence[Span]
    end: float


def in_running_time(
    spans: Sequence[Span], moments: Sequence[float], times: Sequence[float]
) -> list[Span]:
    """Spans moved from the wall clock to running time, by events at ``moments`` (rising) of the
    wall clock and ``times`` of the run.
    """
    if not moments:
        return []

    def at(moment: float) -> float:
        place = max(0, bisect_right(moments, moment) - 1)
        return max(0.0, times[place] + moment - moments[place])

    moved = [replace(span, started=at(span.started), ended=at(span.ended)) for span in spans]
    return [span for span in moved if span.ended >= span.started]


def picture(timeline: Timeline) -> str:
    """The whole run, and the last iteration by itself where the run has more than one."""
    spans = timeline.spans
    whole = _lanes(timeline, 0.0, max([timeline.end, *(span.ended for span in spans)]) or 1.0)
    legend = _legend(timeline)
    if (window := last_iteration(spans)) is None:
        return legend + whole
    start, stop = window
    title = f"The last iteration: {duration(stop - start)}, after {duration(start)}"
    return (
        f"{legend}{whole}<h3"
        f" style='margin-top:18px'>{escape(title)}</h3>{_lanes(timeline, start, stop)}"
    )


def last_iteration(spans: Sequence[Span]) -> tuple[float, float] | None:
    """From the end of the last update but one to the end of the last; None before there are two."""
    ends = sorted(
        span.ended
        for span in spans
        if span.work == "update" and span.outcome == "done" and span.actor == 0
    )
    return (ends[-2], ends[-1]) if len(ends) > 1 else None


def bars_of(spans: Sequence[Span], gap: float) -> list[Bar]:
    """Spans of one lane by their start, neighbours of one kind and outcome joined when less than
    ``gap`` seconds lie between.
    """
    bars: list[Bar] = []
    for span in spans:
        last = bars[-1] if bars else None
        same = last is not None and (last.span.shown, last.span.outcome) == (
            span.shown,
            span.outcome,
        )
        if last is not None and same and span.started - last.stop < gap:
            bars[-1] = Bar(last.span, last.start, max(last.stop, span.ended), last.count + 1)
        else:
            bars.append(Bar(span, span.started, span.ended))
    return bars


# ---- lanes


def _lanes(timeline: Timeline, start: float, stop: float) -> str:
    lanes = {
        name: lane
        for name, lane in timeline.lanes.items()
        if any(a < stop and b > start for a, b in lane.lives)
    }
    by_actor: dict[str, list[Span]] = {}
    for span in timeline.spans:
        if span.ended > start and span.started < stop:
            by_actor.setdefault(span.who, []).append(span)
    hidden = ""
    if len(lanes) > MOST_LANES:
        eventful = {name: lane for name, lane in lanes.items() if lane.marks}
        shown = dict(list((eventful or lanes).items())[:MOST_LANES])
        hidden = f'<p class="note">{len(lanes) - len(shown)} more actors are not drawn.</p>'
        lanes = shown
    place = _placer(start, stop)
    gap = (stop - start) * max(1 / 700, len(lanes) / MOST_BARS)
    published = [(when, version) for when, version in timeline.versions if start <= when <= stop]
    lines = _lines(published, place)
    rows = []
    if published:
        rows.append(
            '<span class="who">policy</span><div class="track'
            f' ticks">{_version_names(published, place)}</div>'
        )
    marks = "".join(_mark(mark, place) for mark in timeline.marks if start <= mark[0] <= stop)
    if marks:
        rows.append(
            '<span class="who">run</span><div'
            f' class="track">{_drawing([], lines, place)}{marks}</div>'
        )
    for name, lane in lanes.items():
        drawing = _drawing(bars_of(by_actor.get(name, []), gap), lines, place)
        lives = "".join(
            _life(max(a, start), min(b, stop), place, bool(timeline.spans))
            for a, b in lane.lives
            if a < stop and b > start
        )
        marks = "".join(
            _mark(mark, place) for mark in lane.marks[:MOST_MARKS] if start <= mark[0] <= stop
        )
        rows.append(
            f'<span class="who">{escape(name)}</span><div'
            f' class="track">{lives}{drawing}{marks}</div>'
        )
    return f'<div class="lanes timeline">{"".join(rows)}{_ruler(stop - start)}</div>{hidden}'


def _placer(start: float, stop: float) -> Callable[[float], float]:
    """Share of the width, 0 to 100, at which a moment lies."""
    return lambda moment: 100 * min(1.0, max(0.0, (moment - start) / ((stop - start) or 1.0)))


def _life(start: float, stop: float, place: Callable[[float], float], quiet: bool) -> str:
    kind = "life quiet" if quiet else "life"
    return (
        f'<span class="{kind}"'
        f' style="left:{place(start):.2f}%;width:{place(stop) - place(start):.2f}%"></span>'
    )


def _drawing(bars: Sequence[Bar], lines: str, place: Callable[[float], float]) -> str:
    if not bars and not lines:
        return ""
    body = "".join(_bar(bar, place) for bar in bars)
    path = f'<path class="version" d="{lines}"/>' if lines else ""
    return (
        f'<svg class="work" viewBox="0 0 {WIDTH:g} {HEIGHT:g}"'
        f' preserveAspectRatio="none">{path}{body}</svg>'
    )


def _bar(bar: Bar, place: Callable[[float], float]) -> str:
    left, right = (place(moment) * WIDTH / 100 for moment in (bar.start, bar.stop))
    kind = "lost" if bar.span.outcome in ("lost", "failed") else f"fill-{bar.span.shown.colour}"
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="0" width="{max(right - left, 0.8):.1f}"'
        f' height="{HEIGHT:g}"><title>{escape(_what(bar))}</title></rect>'
    )


def _what(bar: Bar) -> str:
    span = bar.span
    when = f"{duration(bar.start)} to {duration(bar.stop)}"
    if bar.count > 1:
        return f"{bar.count} × {span.shown.label}: {when}"
    which = "/".join(str(part) for part in span.unit)
    version = "" if span.version is None else f", version {span.version}"
    ending = "" if span.outcome == "done" else f", {span.outcome}"
    again = f", attempt {span.attempt + 1}" if span.attempt else ""
    return f"{span.work} {which}{version}{again}: {when}{ending}"


def _lines(published: Sequence[tuple[float, int]], place: Callable[[float], float]) -> str:
    """A path of upright lines, one per version."""
    few = thin([(when, 0.0) for when, _ in published], MOST_LINES)
    return "".join(f"M{place(when) * WIDTH / 100:.1f} 0V{HEIGHT:g}" for when, _ in few)


def _version_names(published: Sequence[tuple[float, int]], place: Callable[[float], float]) -> str:
    """Every version as a tick, and its number where there is room."""
    parts, free = [], -1.0
    for when, version in published:
        left = place(when)
        if left >= free:
            parts.append(
                f'<span class="{"last" if left > 96 else ""}"'
                f' style="left:{left:.2f}%">v{version}</span>'
            )
            free = left + 6
    return "".join(parts)


def _mark(mark: Mark, place: Callable[[float], float]) -> str:
    when, tone, text = mark
    title = escape(f"{duration(when)}: {text}", quote=True)
    return f'<span class="mark {tone}" style="left:{place(when):.2f}%" title="{title}"></span>'


def _ruler(seconds: float) -> str:
    ticks = "".join(
        f'<span style="left:{25 * part}%">{duration(seconds * part / 4) if part else "0"}</span>'
        for part in range(0, 5, 2)
    )
    return f'<span class="who hide-small"></span><div class="track ruler">{ticks}</div>'


def _legend(timeline: Timeline) -> str:
    """What is there to be seen, and for how long actors had each kind of work in hand."""
    seconds: dict[Work, float] = {}
    for span in timeline.spans:
        seconds[span.shown] = seconds.get(span.shown, 0.0) + span.ended - span.started
    items = [
        '<li><span class="swatch block'
        f' bg-{work.colour}"></span>{escape(work.label)}<b>{duration(total)}</b></li>'
        for work, total in sorted(seconds.items(), key=lambda item: item[0].colour)
    ]
    quiet = ' style="background:var(--rule)"' if timeline.spans else ' style="opacity:.5"'
    items.append(
        f'<li><span class="swatch block{"" if timeline.spans else " bg-1"}"{quiet}></span>in'
        " service</li>"
    )
    if timeline.versions:
        items.append('<li><span class="swatch tall"></span>policy published</li>')
    used = {tone for lane in timeline.lanes.values() for _, tone, _ in lane.marks}
    for tone, label in (
        ("bad", "died"),
        ("good", "replaced or added"),
        ("warn", "unit of work given out again"),
    ):
        if tone in used:
            items.append(
                '<li><span class="swatch block"'
                f' style="background:var(--{tone})"></span>{label}</li>'
            )
    if any(span.outcome in ("lost", "failed") for span in timeline.spans):
        items.append('<li><span class="swatch block lost"></span>work lost</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'
