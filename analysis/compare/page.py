"""``compare.html``: tables and curves of a comparison in one file that needs no network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from analysis.compare.data import REWARD, SCORER, STAGES, Result
from analysis.compare.operations import Cost
from analysis.compare.statistics import CurvePoint, Mean
from analysis.compare.table import NOT_YET
from analysis.report import parts
from analysis.report.charts import Band, Series, line_chart
from analysis.report.parts import Card, Cell, Group, Item, Section, Table, blocks, legend

COLOURS = 8
WIDE = (560.0, 300.0)
Axis = tuple[str, str, Callable[[str, CurvePoint], float]]
"""(quantity, unit, function that returns x for a cell's name and a point of its curve)."""
AXES: tuple[Axis, ...] = (
    ("updates", "iteration", lambda name, moment: float(moment.iteration)),
    ("seconds of training", "seconds", lambda name, moment: moment.seconds.mean),
)


@dataclass(frozen=True)
class Part:
    """Segment of a lane: a stage, its width in percent of the longest lane."""

    stage: str
    colour: int
    seconds: float
    percent: float


@dataclass(frozen=True)
class Lane:
    """Seconds per iteration of one cell, as segments of a bar."""

    title: str
    parts: list[Part]


@dataclass(frozen=True)
class Bars:
    """Chart of seconds per iteration, a lane per cell; it has no lanes if nothing was measured."""

    legend: list[Item]
    lanes: list[Lane]


def render(
    name: str,
    results: Sequence[Result],
    found: Sequence[Table],
    text: Sequence[str],
    settings: Mapping[str, Mapping[str, object]],
    costs: Mapping[str, Sequence[Cost]],
) -> str:
    """Return the page as text.

    ``settings`` holds what differs between cells: key -> {cell title: value}.
    """
    scores, seconds, times, *operations = found
    return parts.render(
        "compare.html",
        name=name,
        what="comparison",
        remarks=text,
        scores=scores,
        curves=_curves(results, _axes(costs)),
        seconds=seconds,
        bars=_bars(results),
        times=times,
        operations=operations,
        settings=_settings(results, settings),
        runs=_runs(results),
    )


def _axes(costs: Mapping[str, Sequence[Cost]]) -> list[Axis]:
    """Return the x axes: updates, seconds, and operations at each ratio."""
    axes = list(AXES)
    for k, cost in enumerate(next(iter(costs.values()), ())):
        axes.append(
            (
                f"operations, quantized ones at {cost.ratio:g}x",
                "1e12 operations",
                lambda name, moment, k=k: moment.iteration * costs[name][k].iteration / 1e12,
            )
        )
    return axes


def _curves(results: Sequence[Result], axes: Sequence[Axis]) -> Section:
    """Return the section with the curves of every score along every axis."""
    cards = []
    for name in dict.fromkeys(name for result in results for name in result.curves):
        what = "held-out reward" if name == REWARD else name.removeprefix(SCORER)
        for axis, unit, x_of in axes:
            lines, bands = [], []
            for index, result in enumerate(results):
                curve = [
                    (x, moment)
                    for moment in result.curves.get(name, [])
                    if math.isfinite(x := x_of(result.name, moment))
                ]
                if not curve:
                    continue
                colour, xs = index % COLOURS + 1, [x for x, _ in curve]
                means = [moment.gain for _, moment in curve]
                low, middle, high = (_shifted(xs, means, side) for side in (-1, 0, 1))
                lines.append(Series(result.title, middle, colour, dashed=index >= COLOURS))
                bands.append(Band(f"{result.title}, one standard error", low, high, colour))
            if lines:
                title = f"Gain in {what} by {axis}"
                chart = line_chart(lines, bands=bands, label=title, x_label=unit, size=WIDE)
                cards.append(Card(title, chart, legend(lines, 4)))
    lead = (
        "Gain over the same run before training, mean over run seeds; the band is one standard"
        " error to either side. Seconds are those of iterations alone."
    )
    return Section("Held-out curves", lead, [Group(cards)] if cards else [], NOT_YET)


def _shifted(xs: Sequence[float], means: Sequence[Mean], side: int) -> list[tuple[float, float]]:
    """Return the curve of the means, shifted by ``side`` standard errors."""
    return [
        (x, mean.mean + side * mean.error if side else mean.mean)
        for x, mean in zip(xs, means, strict=True)
    ]


def _bars(results: Sequence[Result]) -> Bars:
    stages = [*((stage, colour) for colour, stage in enumerate(STAGES, 1)), ("other", 8)]
    seconds = {
        result.title: [_seconds(result, stage) for stage, _ in stages]
        for result in results
        if result.counted
    }
    longest = max(map(math.fsum, seconds.values()), default=0.0)
    lanes = [
        Lane(
            title,
            [
                Part(stage, colour, stage_seconds, 100 * stage_seconds / longest)
                for (stage, colour), stage_seconds in zip(stages, of_stages, strict=True)
                if stage_seconds > 0
            ],
        )
        for title, of_stages in seconds.items()
        if longest > 0
    ]
    return Bars(blocks([(stage, colour, "") for stage, colour in stages]), lanes)


def _seconds(result: Result, stage: str) -> float:
    value = result.stages[stage].mean if stage in result.stages else 0.0
    return value if math.isfinite(value) else 0.0


def _settings(results: Sequence[Result], settings: Mapping[str, Mapping[str, object]]) -> Table:
    shown = next(iter(settings.values()), {})
    titles = [result.title for result in results if result.title in shown]
    rows = [
        (key, *("–" if by_cell.get(title) is None else str(by_cell[title]) for title in titles))
        for key, by_cell in settings.items()
    ]
    return Table(
        ("setting", *titles),
        rows,
        words=range(len(titles) + 1),
        title="Settings that differ between the cells",
        note="Everything else is the same.",
        none="There is one cell only.",
    )


def _runs(results: Sequence[Result]) -> Table:
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
    heads = ("cell", "run seed", "directory", "how it ended")
    note = "Each has a report.html of its own."
    return Table(heads, rows, words=(0, 2, 3), title="The runs", note=note, none="There are none.")
