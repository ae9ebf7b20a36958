"""``compare.html``: the tables and curves of a comparison in one file that opens without a network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from analysis.compare.data import REWARD, SCORER, STAGES, Result
from analysis.compare.statistics import Mean, Moment
from analysis.compare.table import Table
from analysis.report.charts import Band, Series, line_chart, number
from analysis.report.page import POLICY
from analysis.report.parts import Cell, blocks, card, legend, nothing, side_by_side, table
from analysis.report.style import style_sheet

COLOURS = 8
WIDE = (560.0, 300.0)


def render(
    name: str,
    results: Sequence[Result],
    found: Sequence[Table],
    said: Sequence[str],
    settings: dict[str, Any],
) -> str:
    """The page as text. ``settings``: key -> value by cell title, of what differs between cells."""
    scores, seconds, times = found
    sections = [
        (scores.title, scores.note, _table(scores)),
        (
            "Held-out curves",
            (
                "Gain over the same run before training, mean over run seeds; the band is one"
                " standard error to either side. Seconds are those of iterations alone."
            ),
            _curves(results),
        ),
        (seconds.title, seconds.note, _bars(results) + _table(seconds)),
        (times.title, times.note, _table(times)),
        (
            "What differs between the cells",
            "Everything else is the same.",
            _settings(results, settings),
        ),
        ("The runs", "Each has a report.html of its own.", _runs(results)),
    ]
    body = "".join(
        f'<section><h2>{escape(title)}</h2><p class="lead">{escape(lead)}</p>{content}</section>'
        for title, lead, content in sections
    )
    banner = "".join(f"<p>{escape(remark)}.</p>" for remark in said)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(name)}: Sol-RL"
        f" comparison</title><style>{style_sheet()}</style></head><body><main>"
        f'<header><div class="eyebrow">Sol-RL comparison</div><h1>{escape(name)}</h1>'
        f"{f'<div class={chr(34)}banner{chr(34)}>{banner}</div>' if banner else ''}</header>{body}"
        "<footer>Made from the run directories by <code>sol-rl compare</code>. This page loads"
        " nothing from anywhere.</footer>"
        "</main></body></html>\n"
    )


def _table(found: Table) -> str:
    none = nothing("No run has come to its end yet.")
    return f'<div class="card">{table(found.heads, found.rows)}</div>' if found.rows else none


def _curves(results: Sequence[Result]) -> str:
    """By updates and by seconds, for every score."""
    names = list(dict.fromkeys(name for result in results for name in result.curves))
    axes: tuple[tuple[str, str, Callable[[Moment], float]], ...] = (
        ("updates", "iteration", lambda moment: float(moment.iteration)),
        ("seconds of training", "seconds", lambda moment: moment.seconds.mean),
    )
    cards = []
    for name in names:
        title = (
            "Gain in held-out reward" if name == REWARD else f"Gain in {name.removeprefix(SCORER)}"
        )
        for axis, unit, x_of in axes:
            lines, bands = [], []
            for at, result in enumerate(results):
                if curve := [
                    moment for moment in result.curves.get(name, []) if math.isfinite(x_of(moment))
                ]:
                    colour = at % COLOURS + 1
                    xs = [x_of(moment) for moment in curve]
                    means = [moment.gain for moment in curve]
                    lines.append(
                        Series(result.title, _at(xs, means, 0), colour, dashed=at >= COLOURS)
                    )
                    bands.append(
                        Band(
                            f"{result.title}, one standard error",
                            _at(xs, means, -1),
                            _at(xs, means, 1),
                            colour,
                        )
                    )
            if lines:
                chart = line_chart(
                    lines, bands=bands, label=f"{title} by {axis}", x_label=unit, size=WIDE
                )
                cards.append(card(f"{title} by {axis}", legend(lines, 4) + chart))
    return side_by_side(cards) if cards else nothing("No run has come to its end yet.")


def _at(xs: Sequence[float], means: Sequence[Mean], side: int) -> list[tuple[float, float]]:
    """The curve of the means, shifted by ``side`` standard errors."""
    return [
        (x, mean.mean + side * mean.error if side else mean.mean)
        for x, mean in zip(xs, means, strict=True)
    ]


def _bars(results: Sequence[Result]) -> str:
    """Stacked bars of seconds per iteration, one line per cell."""
    counted = [result for result in results if result.counted]
    parts = [(stage, colour) for colour, stage in enumerate(STAGES, 1)] + [("other", 8)]
    longest = max((_sum(result, parts) for result in counted), default=0.0)
    if not longest > 0:
        return ""
    colours = blocks([(stage, colour, "") for stage, colour in parts])
    rows = []
    for result in counted:
        spans = "".join(
            f'<span class="bar bg-{colour}"'
            f' style="width:{100 * share / longest:.2f}%;margin:0;border-radius:0"'
            f' title="{escape(stage)} {number(share)} s"></span>'
            for stage, colour in parts
            if (share := _of(result, stage)) > 0
        )
        rows.append(
            f'<div class="who">{escape(result.title)}</div><div style="font-size:0">{spans}</div>'
        )
    lanes = card(
        "Seconds per iteration",
        f'<ul class="legend">{colours}</ul><div class="lanes">{"".join(rows)}</div>',
    )
    return f'{lanes}<div class="gap"></div>'


def _of(result: Result, stage: str) -> float:
    value = result.stages[stage].mean if stage in result.stages else 0.0
    return value if math.isfinite(value) else 0.0


def _sum(result: Result, parts: Sequence[tuple[str, int]]) -> float:
    return math.fsum(_of(result, stage) for stage, _ in parts)


def _settings(results: Sequence[Result], settings: dict[str, Any]) -> str:
    titles = [
        result.title for result in results if result.title in next(iter(settings.values()), {})
    ]
    rows = [
        (key, *(_shown(by_cell.get(title)) for title in titles))
        for key, by_cell in settings.items()
    ]
    every = range(len(titles) + 1)
    return (
        f'<div class="card">{table(("setting", *titles), rows, words=every)}</div>'
        if rows
        else nothing("There is one cell only.")
    )


def _shown(value: Any) -> str:
    return "–" if value is None else str(value)


def _runs(results: Sequence[Result]) -> str:
    rows = [
        (
            result.title,
            str(run.seed),
            Cell(run.path.name, "wide"),
            Cell(run.why or "finished", "wide"),
        )
        for result in results
        for run in result.runs
    ]
    return (
        "<div"
        f' class="card">{table(("cell", "run seed", "directory", "how it ended"), rows, words=(0, 2, 3))}</div>'
    )
