"""Timeline for a terminal: one line per actor, one character per slice of time."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.report.service_lanes import Lane
from analysis.report.timeline import Chart
from records.formatting import duration
from records.timeline import OTHER, Span

IDLE, GONE, LOST = "·", " ", "X"
LETTERS = {
    **{"explore": "e", "regenerate": "r", "update": "U", "publish": "p", "score": "s"},
    **{"encode": "c", "select": "k", "move": "m", OTHER.label: "o"},
}
"""Maps the label of a kind of work to its letter."""


def lines_of(chart: Chart, width: int = 100) -> list[str]:
    """Return the chart as lines: policy versions, one line per actor, the time scale, a legend.

    The time axis is ``width`` characters wide.
    """
    end = chart.end or 1.0
    names = max([len("policy"), *(len(name) for name in chart.lanes)])
    by_actor: dict[str, list[Span]] = {}
    for span in chart.spans:
        by_actor.setdefault(span.who, []).append(span)
    lines = [f"{'policy':<{names}} {_versions(chart.versions, end, width)}"]
    lines += [
        f"{name:<{names}} {strip(by_actor.get(name, []), lane, end, width)}"
        for name, lane in chart.lanes.items()
    ]
    half = width // 2
    lines.append(
        f"{'':<{names}} {'0':<{half}}{duration(end / 2)}".ljust(
            names + 1 + width - len(duration(end))
        )
        + duration(end)
    )
    used = {span.display.label for span in chart.spans}
    legend = [f"{letter} {label}" for label, letter in LETTERS.items() if label in used]
    lines.append("  ".join([*legend, f"{LOST} died", f"{IDLE} idle"]))
    return lines


def strip(spans: Sequence[Span], lane: Lane, end: float, width: int) -> str:
    """Return one character per slice of time: the letter of the actor's longest work in it.

    Letters are shown for slices that were busy for at least a third of the time. Other slices are
    idle or, when the actor was not alive, blank; LOST marks its death.
    """
    slice_s = end / width
    busy: list[dict[str, float]] = [{} for _ in range(width)]
    for span in spans:
        for index in range(_slice(span.started, end, width), _slice(span.ended, end, width) + 1):
            overlap = min(span.ended, (index + 1) * slice_s) - max(span.started, index * slice_s)
            letter = LETTERS[span.display.label]
            busy[index][letter] = busy[index].get(letter, 0.0) + max(0.0, overlap)
    cells = []
    for index, seconds in enumerate(busy):
        middle = (index + 0.5) * slice_s
        alive = any(start <= middle <= stop for start, stop in lane.lives)
        letter = max(seconds, key=lambda each: seconds[each], default="")
        cells.append(
            letter if letter and sum(seconds.values()) >= slice_s / 3 else IDLE if alive else GONE
        )
    for when, tone, _ in lane.marks:
        if tone == "bad":
            cells[_slice(when, end, width)] = LOST
    return "".join(cells)


def _versions(versions: Sequence[tuple[float, int]], end: float, width: int) -> str:
    cells, free = [" "] * width, 0
    for when, version in versions:
        column, text = _slice(when, end, width), f"v{version}"
        if column >= free and column + len(text) <= width:
            cells[column : column + len(text)] = text
            free = column + len(text) + 1
    return "".join(cells).rstrip()


def _slice(moment: float, end: float, width: int) -> int:
    return min(width - 1, max(0, int(moment / end * width)))
