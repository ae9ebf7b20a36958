"""Report section on events: a timeline with a lane per actor, and a table of unusual events."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.report.data import Row, RunData, actor_of, finite_or_none
from analysis.report.parts import Cell, Table
from analysis.report.service_lanes import Lane, Mark
from analysis.report.timeline import Chart, Drawing, drawing, in_running_time
from records.formatting import duration

TONES = {
    "good": ("actor_started", "actor_replaced", "actor_added", "run_finished", "scorer_reached"),
    "bad": ("actor_died", "actor_benched", "node_lost", "run_failed", "identity_failed"),
    "warn": (
        *("chunk_reissued", "run_resumed", "run_stopped", "stopped_early", "scaling_refused"),
        *("metrics_unavailable", "metric_undeclared", "sink_failed", "report_failed"),
        *("images_missed", "actor_waits", "audit_low", "backend_moved", "backend_kept"),
        *("scorer_constant", "output_closed", "board_failed", "end_failed", "timeline_ended"),
        *("activations_saturated", "storage_retried", "object_store_on_disk"),
        "ray_directory_replaced",
        *("memory_limit_reached", "gpus_unused", "checkpoint_incomplete", "scorer_unreachable"),
    ),
}
"""Events by tone; all others have the tone "plain"."""
ROUTINE = {"version_published", "checkpoint_saved", "actor_started", "identity_checked"}
"""Events that are counted and drawn, but not listed in the table of unusual events."""
KINDS = ("rollout", "reward", "scorers.", "selector", "encoder", "learner")
"""Prefixes of actor names in the order of their lanes.

``scorers.<label>`` is a scorer with its own actors.
"""
MOST_ROWS, LONGEST = 150, 110
FEW, TOGETHER_S = 4, 60.0
"""More like events than this, each within seconds of the one before, are one row."""
Moment = tuple[Row, float]
"""(event, running time)."""
NOUNS = {
    "actor_started": "started",
    "actor_replaced": "replaced",
    "actor_died": "died",
    "actor_benched": "benched",
    "chunk_reissued": "tasks retried",
    "version_published": "versions published",
    "identity_checked": "weights checked",
    "checkpoint_saved": "checkpoints saved",
    "run_resumed": "resumes",
    "node_lost": "nodes lost",
}


def running_times(events: Sequence[Row]) -> list[float]:
    """Return the running time at each event in seconds, excluding the pause before a resume."""
    times, offset, last = [], None, 0.0
    for event in events:
        moment = finite_or_none(event.get("time"))
        if moment is None:
            times.append(last)
            continue
        if offset is None:
            offset = moment
        elif event["event"] == "run_resumed":
            offset = moment - last
        last = max(last, moment - offset)
        times.append(last)
    return times


def lanes_of(events: Sequence[Row], times: Sequence[float]) -> dict[str, Lane]:
    """Return actor name -> lane, in the order of ``KINDS``, other actors last."""
    lanes: dict[str, Lane] = {}
    end = max(times, default=0.0)
    for event, when in zip(events, times, strict=True):
        name, actor = event["event"], actor_of(event)
        if actor is None:
            continue
        lane = lanes.setdefault(
            actor, Lane(open_since=0.0 if name not in ("actor_started", "actor_added") else None)
        )
        if name in ("actor_started", "actor_added", "actor_replaced"):
            if lane.open_since is not None:
                lane.lives.append((lane.open_since, when))
            lane.open_since = when
        elif (
            name in ("actor_died", "actor_benched", "actor_removed") and lane.open_since is not None
        ):
            lane.lives.append((lane.open_since, when))
            lane.open_since = None
        if name != "actor_started":
            lane.marks.append((when, _tone(event), _words(event) + _because(event)))
    for lane in lanes.values():
        if lane.open_since is not None:
            lane.lives.append((lane.open_since, end))
    return {name: lanes[name] for name in sorted(lanes, key=_lane_order)}


@dataclass(frozen=True)
class EventsSection:
    """Content of the section: counts of events, the timeline, and tables of events."""

    counts: list[tuple[str, int]]
    drawing: Drawing
    notable: Table
    everything: Table | None


def events_section(run: RunData) -> EventsSection | None:
    """Return the content of the section, or None if there are no events."""
    if not run.events:
        return None
    times = running_times(run.events)
    counts = Counter(str(event["event"]) for event in run.events)
    pairs = list(zip(run.events, times, strict=True))
    notable = [(event, when) for event, when in pairs if event["event"] not in ROUTINE]
    last, count = pairs[-MOST_ROWS:], f"{len(pairs):,} events"
    which = f"All {count}" if len(last) == len(pairs) else f"The last {len(last)} of {count}"
    rows = like_events(notable)
    omitted = f"The last {MOST_ROWS} of {len(rows):,} rows; all events are in events.jsonl."
    return EventsSection(
        [(noun, counts[name]) for name, noun in NOUNS.items() if counts[name]],
        drawing(timeline_of(run, times)),
        _table(rows[-MOST_ROWS:], LONGEST, note=omitted if len(rows) > MOST_ROWS else ""),
        _table([[pair] for pair in last], title=which) if len(pairs) > len(rows) else None,
    )


def timeline_of(run: RunData, times: Sequence[float]) -> Chart:
    """Return the content of the timeline, in seconds of running time."""
    events = run.events
    known = [
        (moment, when)
        for event, when in zip(events, times, strict=True)
        if (moment := finite_or_none(event.get("time"))) is not None
    ]
    spans = in_running_time(run.spans, [moment for moment, _ in known], [when for _, when in known])
    published = [
        (when, int(version))
        for event, when in zip(events, times, strict=True)
        if event["event"] == "version_published"
        and (version := finite_or_none(event.get("version"))) is not None
    ]
    return Chart(
        lanes_of(events, times),
        _run_marks(events, times),
        published,
        spans,
        max(times, default=0.0),
    )


def _run_marks(events: Sequence[Row], times: Sequence[float]) -> list[Mark]:
    """Return marks for events of the whole run, such as resumes, scaling and its end."""
    marks = []
    for event, when in zip(events, times, strict=True):
        name = event["event"]
        if actor_of(event) is None and name not in (
            "version_published",
            "checkpoint_saved",
            "run_started",
        ):
            change = (
                f" {event.get('kind')} {event.get('before')} → {event.get('after')}"
                if name == "pool_scaled"
                else ""
            )
            marks.append((when, _tone(event), _words(event) + change + _because(event)))
    return marks


def like_events(pairs: Sequence[Moment]) -> list[list[Moment]]:
    """Group events of the same name and service, in the order of the first of each group.

    A group has more than ``FEW`` events; all others are groups of one.
    """
    groups: list[list[Moment]] = []
    newest: dict[tuple[str, str], list[Moment]] = {}
    for event, when in pairs:
        key = str(event["event"]), str(event.get("kind"))
        group = newest.get(key)
        if group is None or when - group[-1][1] > TOGETHER_S:
            groups.append(group := [])
            newest[key] = group
        group.append((event, when))
    apart = [[one] for group in groups if len(group) <= FEW for one in group]
    merged = [group for group in groups if len(group) > FEW]
    return sorted(apart + merged, key=lambda group: group[0][1])


def _table(
    groups: Sequence[Sequence[Moment]], longest: int = 2000, title: str = "", note: str = ""
) -> Table:
    """Return a table of events, a row per group of like ones.

    Reasons are shortened to ``longest`` characters; the tooltip has the full text.
    """
    cells = [
        _merged(group, longest) if len(group) > 1 else _single(*group[0], longest)
        for group in groups
    ]
    heads = ("after", "what", "who", "details")
    return Table(heads, cells, words=(1, 2, 3), kind="events", title=title, note=note)


def _single(event: Row, when: float, longest: int) -> tuple[Cell, ...]:
    return (
        Cell(duration(when), "when"),
        Cell(_words(event), f"{_tone(event)}-ink"),
        Cell(actor_of(event) or "", "who"),
        Cell(_details(event, longest), "wide", title=_details(event)),
    )


def _merged(group: Sequence[Moment], longest: int) -> tuple[Cell, ...]:
    """Return a row with the fields that are the same in all events of the group."""
    event = group[0][0]
    same = {
        key: value
        for key, value in event.items()
        if key in ("event", "kind", "actor") or all(e.get(key) == value for e, _ in group)
    }
    reasons = Counter(str(e["why"]) for e, _ in group if e.get("why")).most_common()
    if len(reasons) > 1:
        often, count = reasons[0]
        same["why"] = f"{count} × {_cut(often, longest)}; {len(reasons) - 1:,} other reasons"
        longest += len(same["why"])
    names = list(dict.fromkeys(name for e, _ in group if (name := actor_of(e))))
    who = f"{len(names):,} {names[0].rpartition('-')[0]} actors" if len(names) > 1 else ""
    ends = " to ".join(dict.fromkeys(duration(group[at][1]) for at in (0, -1)))
    return (
        Cell(ends, "when"),
        Cell(f"{len(group):,} × {_words(event)}", f"{_tone(event)}-ink"),
        Cell(who or "".join(names), "who", title=", ".join(names)),
        Cell(_details(same, longest), "wide", title=f"the first: {_details(event)}"),
    )


def _words(event: Row) -> str:
    return str(event["event"]).replace("_", " ")


def _tone(event: Row) -> str:
    return next((tone for tone, names in TONES.items() if event["event"] in names), "plain")


def _because(event: Row) -> str:
    return f" ({_cut(str(event['why']), LONGEST)})" if event.get("why") else ""


def _details(event: Row, longest: int = 2000) -> str:
    """Return the fields of an event that have no column of their own, the reason last.

    Of a node's id, its first letters, as `sol-rl status` shows them.
    """
    why = [_cut(str(event["why"]), longest)] if event.get("why") else []
    own = {"time", "event", "why", *(("actor", "kind") if actor_of(event) else ())}
    rest = [
        f"{key.replace('_', ' ')} {str(value)[:8] if key == 'node' else _plain(value)}"
        for key, value in event.items()
        if key not in own and value is not None
    ]
    return " · ".join(rest + why)


def _cut(text: str, longest: int) -> str:
    """Shorten ``text`` to about ``longest`` characters, cutting between words."""
    text = " ".join(text.split())
    return text if len(text) <= longest else text[:longest].rsplit(" ", 1)[0] + " …"


def _plain(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and value >= 1_000_000 else str(value)


def _lane_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    kind = next(
        (index for index, prefix in enumerate(KINDS) if name.startswith(prefix)), len(KINDS)
    )
    return kind, [
        (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)
    ]
