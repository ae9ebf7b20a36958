"""What happened to the actors: a lane per actor, and a table of what was out of the ordinary."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from analysis.report.data import REASON_KEYS, Row, RunData, actor_of, finite
from analysis.report.parts import Cell, nothing, table
from analysis.report.timeline import Lane, Mark, Timeline, in_running_time, picture
from records.progress import duration

TONES = {
    "actor_started": "good", "actor_replaced": "good", "actor_died": "bad", "actor_benched": "bad", "chunk_reissued": "warn",
    "run_started": "plain", "run_resumed": "warn", "run_finished": "good", "run_failed": "bad", "run_stopped": "warn",
    "stopped_early": "warn", "metrics_unavailable": "warn", "sink_failed": "warn", "pool_scaled": "plain", "actor_added": "good", "actor_removed": "plain",
    "node_lost": "bad", "nodes_asked": "plain", "scaling_refused": "warn", "actor_waits": "warn",
    "audit_low": "warn", "backend_moved": "warn", "backend_chosen": "plain", "backend_kept": "warn",
}  # fmt: skip
ROUTINE = {"version_published", "checkpoint_saved", "actor_started"}
"""Events that are counted and drawn, but not listed."""
KINDS = ("rollout", "reward", "scorers.", "selector", "encoder", "learner")
"""Beginnings of actors' names, in the order of their lanes; a scorer with actors of its own is
``scorers.<label>``.
"""
MOST_ROWS, LONGEST = 150, 110
NOUNS = {
    "actor_started": "started", "actor_replaced": "replaced", "actor_died": "died", "actor_benched": "benched",
    "chunk_reissued": "units given out again", "version_published": "versions published", "checkpoint_saved": "checkpoints saved",
    "run_resumed": "resumes", "node_lost": "nodes lost",
}  # fmt: skip


def running_times(events: Sequence[Row]) -> list[float]:
    """Seconds of running time at each event: from the first on, the pause before a resume taken
    out.
    """
    times, offset, last = [], None, 0.0
    for event in events:
        moment = finite(event.get("time"))
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
    """A lane per actor, in the order of ``KINDS``, others last."""
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
            lane.marks.append((when, TONES.get(name, "plain"), _words(name) + _because(event)))
    for lane in lanes.values():
        if lane.open_since is not None:
            lane.lives.append((lane.open_since, end))
    return {name: lanes[name] for name in sorted(lanes, key=_lane_order)}


def section(run: RunData) -> str:
    """The whole section's body; says so when there were no events."""
    if not run.events:
        return nothing("No events were recorded.")
    times = running_times(run.events)
    counts = Counter(event["event"] for event in run.events)
    said = [f"<b>{counts[name]:,}</b> {noun}" for name, noun in NOUNS.items() if counts[name]]
    summary = f'<p class="lead">{" · ".join(said)}</p>' if said else ""
    return (
        summary
        + f'<div class="card">{picture(timeline_of(run, times))}</div>'
        + _tables(run.events, times)
    )


def timeline_of(run: RunData, times: Sequence[float]) -> Timeline:
    """What the picture shows, everything in seconds of running time."""
    events = run.events
    known = [
        (moment, when)
        for event, when in zip(events, times, strict=True)
        if (moment := finite(event.get("time"))) is not None
    ]
    spans = in_running_time(run.spans, [moment for moment, _ in known], [when for _, when in known])
    published = [
        (when, int(event["version"]))
        for event, when in zip(events, times, strict=True)
        # fmt: skip
        if event["event"] == "version_published" and finite(event.get("version")) is not None
    ]
    return Timeline(
        lanes_of(events, times),
        _run_marks(events, times),
        published,
        spans,
        max(times, default=0.0),
    )


def _run_marks(events: Sequence[Row], times: Sequence[float]) -> list[Mark]:
    """What befell the run as a whole: resumes, scaling, its end."""
    marks = []
    for event, when in zip(events, times, strict=True):
        name = event["event"]
        if actor_of(event) is None and name not in (
            "version_published",
            "checkpoint_saved",
            "run_started",
        ):
            change = (
                f" {event.get('kind')} {event['before']} → {event['after']}"
                if name == "pool_scaled"
                else ""
            )
            marks.append((when, TONES.get(name, "plain"), _words(name) + change + _because(event)))
    return marks


def _tables(events: Sequence[Row], times: Sequence[float]) -> str:
    pairs = list(zip(events, times, strict=True))
    notable = [(event, when) for event, when in pairs if event["event"] not in ROUTINE]
    parts = []
    if notable:
        parts.append(
            '<div class="card"'
            f' style="margin-top:16px">{_table(notable[-MOST_ROWS:], LONGEST)}</div>'
        )
        if len(notable) > MOST_ROWS:
            parts.append(
                f'<p class="note">The last {MOST_ROWS} of {len(notable):,}; all are in'
                " events.jsonl.</p>"
            )
    if len(pairs) > len(notable):
        last = pairs[-MOST_ROWS:]
        which = (
            f"All {len(pairs):,} events"
            if len(last) == len(pairs)
            else f"The last {len(last)} of {len(pairs):,} events"
        )
        parts.append(
            f'<details class="card"><summary>{which}</summary><div>{_table(last)}</div></details>'
        )
    return "".join(parts)


def _table(rows: Sequence[tuple[Row, float]], longest: int = 2000) -> str:
    """Events as rows; a reason longer than ``longest`` characters is cut, and whole where the
    reader points at it.
    """
    cells = []
    for event, when in rows:
        name = event["event"]
        cells.append(
            (
                Cell(duration(when), "when"),
                Cell(_words(name), f"{TONES.get(name, 'plain')}-ink"),
                Cell(actor_of(event) or "", "who"),
                Cell(_details(event, longest), "wide", title=_details(event)),
            )
        )
    return table(("after", "what", "who", "details"), cells, words=(1, 2, 3), kind="events")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _because(event: Row) -> str:
    why = next((str(event[key]) for key in REASON_KEYS if event.get(key)), "")
    return f" ({_cut(why, LONGEST)})" if why else ""


def _details(event: Row, longest: int = 2000) -> str:
    """The fields of an event, the reason last, without those that have a column of their own."""
    why = [_cut(str(event[key]), longest) for key in REASON_KEYS if event.get(key)]
    own = (
        {"time", "event", "actor", "kind", *REASON_KEYS}
        if actor_of(event)
        else {"time", "event", *REASON_KEYS}
    )
    rest = [
        f"{key.replace('_', ' ')} {_plain(value)}"
        for key, value in event.items()
        if key not in own and value is not None
    ]
    return " · ".join(rest + why)


def _cut(text: str, longest: int) -> str:
    """``text`` up to ``longest`` characters, cut between words."""
    text = " ".join(text.split())
    return text if len(text) <= longest else text[:longest].rsplit(" ", 1)[0] + " …"


def _plain(value: object) -> str:
    return (
        f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1_000_000
        else str(value)
    )


def _lane_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    kind = next(
        (index for index, prefix in enumerate(KINDS) if name.startswith(prefix)), len(KINDS)
    )
    return kind, [
        (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)
    ]
