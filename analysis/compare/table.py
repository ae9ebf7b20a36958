"""The tables of a comparison, which terminal and page share, and their lines for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from analysis.compare.data import REWARD, SCORER, Result
from analysis.compare.operations import Cost
from analysis.compare.statistics import NOTHING, SHARES, Mean
from analysis.report.parts import Table
from records.tables import markdown

NONE = "-"
NOT_YET = "No run has come to its end yet."
PARTS = ("explore", "regenerate", "update", "publish", "other")


def tables(
    results: Sequence[Result], baseline: str, costs: Mapping[str, Sequence[Cost]] | None = None
) -> list[Table]:
    """Scores, seconds per iteration, times to parts of the baseline's gain; and by ``costs`` the
    same in operations, a table per ratio.
    """
    one = next(result for result in results if result.name == baseline)
    found = [scores(results, one), seconds(results, one), times(results, one)]
    ratios = len(costs[one.name]) if costs else 0
    by_cell = {result.title: (costs or {}).get(result.name) for result in results}
    return found + [
        operations({title: cell[k] for title, cell in by_cell.items() if cell}, one)
        for k in range(ratios)
    ]


def scores(results: Sequence[Result], baseline: Result) -> Table:
    """Held-out scores and gains."""
    names = list(dict.fromkeys(name for result in results for name in result.score))
    heads = ["method", "run seeds"]
    heads += [
        f"{_title(name)} (base {_value(baseline.base.get(name, NOTHING).mean)})" for name in names
    ]
    heads += ["± within a run", f"gain less {baseline.title}'s"]
    rows = []
    for result in results:
        count = len(result.counted)
        seeds = (
            "refused"
            if result.refused
            else str(count)
            if count == len(result.runs)
            else f"{count} of {len(result.runs)}"
        )
        cells = [_score(result, name) for name in names]
        less = NONE if result is baseline else _signed(result.against.get(REWARD, NOTHING))
        rows.append((result.title, seeds, *cells, _value(result.within), less))
    note = (
        "Score (gain over the same run before training), each ± its standard error over run seeds."
        " '± within a run': mean standard error of a run's gain, clustered by prompt. The last"
        " column is paired by run seed: same prompts, same seeds."
    )
    title = "Held-out score and gain over base"
    return Table(heads, rows, title=title, note=note, none=NOT_YET)


def seconds(results: Sequence[Result], baseline: Result) -> Table:
    """Seconds per iteration by stage."""
    heads = ("seconds per iteration", *PARTS, "rollout", "speed-up", "iteration", "speed-up")
    rows = []
    for result in results:
        if not result.counted:
            continue
        stages = result.stages
        whole = stages.get("iteration", NOTHING)
        rows.append(
            (
                result.title,
                *(_seconds(stages.get(part, NOTHING).mean) for part in PARTS),
                _seconds(stages.get("rollout", NOTHING).mean),
                _times(result.speed_ups.get("rollout", math.nan)),
                _with_error(_seconds(whole.mean), whole, _seconds),
                _times(result.speed_ups.get("iteration", math.nan)),
            )
        )
    note = (
        "Means over iterations (without the first, which warms up) and run seeds, ± standard error"
        " over run seeds. Rollout is explore and regenerate, and with explore_ahead what was"
        " explored beside the iteration before; stages overlap, so regenerate is what exploring"
        f" left to do. Speed-ups against {baseline.title}."
    )
    return Table(heads, rows, title="Seconds per iteration", note=note, none=NOT_YET)


def times(results: Sequence[Result], baseline: Result) -> Table:
    """Seconds of training until parts of the baseline's gain are reached."""
    goal = baseline.gain.get(REWARD, NOTHING).mean
    heads = (
        "seconds to a gain of",
        *(f"{100 * share:.0f} % ({_value(share * goal)})" for share in SHARES),
    )
    rows = []
    for result in results:
        if not result.counted:
            continue
        cells = []
        for share in SHARES:
            mine, theirs = result.reach.get(share), baseline.reach.get(share)
            factor = (
                f" ({_times(theirs / mine)})" if mine and theirs and result is not baseline else ""
            )
            cells.append(NONE if mine is None else _seconds(mine) + factor)
        rows.append((result.title, *cells))
    note = (
        f"Parts of the final gain of {baseline.title}. Seconds of iterations alone, without"
        " starting up and evaluating; mean curves over run seeds, straight between evaluations."
        " '-': not reached."
    )
    return Table(heads, rows, title="Time to the baseline's gain", note=note, none=NOT_YET)


def operations(cells: Mapping[str, Cost], baseline: Result) -> Table:
    """Costs and gains of cells at one ratio of quantized to unquantized operations."""
    one = cells[baseline.title]
    heads = (
        "operations",
        "per iteration, 1e12",
        f"over {baseline.title}'s",
        *(f"to {100 * share:.0f} % of its gain" for share in SHARES[1:]),
        *(f"gain at {part:g} of its operations, less its own" for part in one.against),
    )
    rows = []
    for title, cell in cells.items():
        reached = []
        for share in SHARES[1:]:
            mine, theirs = cell.reach[share], one.reach[share]
            factor = f" ({mine / theirs:.2f})" if mine and theirs and cell is not one else ""
            reached.append(NONE if mine is None else f"{mine / 1e12:.3g}{factor}")
        against = [_signed(value) for value in cell.against.values()]
        rows.append(
            (title, f"{cell.iteration / 1e12:.3g}", f"{cell.relative:.3f}", *reached, *against)
        )
    note = (
        "Operations of exploring, regenerating and updating, decoding included, two per"
        " multiplication and addition, counted on the architecture;"
        f" {one.ratio:g} quantized ones count as one. In brackets over those of {baseline.title}."
        " The last columns: the gain when so many of its operations are spent, less its gain at the"
        " end, paired by run seed; '-': the run ended before."
    )
    title = f"Operations, quantized ones at {one.ratio:g}x"
    return Table(heads, rows, title=title, note=note, none=NOT_YET)


def lines(found: Sequence[Table], said: Sequence[str]) -> list[str]:
    """Markdown tables with their columns in line, then the remarks."""
    text: list[str] = []
    for table in found:
        rows = [[cell.text for cell in row] for row in table.body]
        title = f"{table.title}. {table.note}"
        text += ["", title, "", *markdown(table.heads, rows, numbers=True)]
    return [*text[1:], *([""] if said else []), *(f"! {remark}" for remark in said)]


def _title(name: str) -> str:
    return "reward" if name == REWARD else name.removeprefix(SCORER)


def _score(result: Result, name: str) -> str:
    score, gain = result.score.get(name, NOTHING), result.gain.get(name, NOTHING)
    return f"{_with_error(_value(score.mean), score)} ({_signed(gain)})" if score.count else NONE


def _signed(value: Mean) -> str:
    return _with_error(f"{value.mean:+.4f}", value) if value.count else NONE


def _value(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else NONE


def _with_error(said: str, value: Mean, text: Callable[[float], str] = _value) -> str:
    """What is ``said`` of a mean, and its error where that is known."""
    return said + (f" ± {text(value.error)}" if math.isfinite(value.error) else "")


def _seconds(value: float) -> str:
    return f"{value:.{1 if value >= 9.995 else 2}f}" if math.isfinite(value) else NONE


def _times(value: float) -> str:
    return f"{value:.2f}x" if math.isfinite(value) else NONE
