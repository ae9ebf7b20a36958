"""Tables of a comparison, shared by terminal and page, and their rendering as text lines."""

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
    """Return all tables: scores, seconds per iteration, and times to the baseline's gain.

    If ``costs`` are given, add one table per ratio that counts operations instead of seconds.
    """
    reference = next(result for result in results if result.name == baseline)
    result_tables = [
        scores(results, reference),
        seconds(results, reference),
        times(results, reference),
    ]
    ratios = len(costs[reference.name]) if costs else 0
    by_cell = {result.title: (costs or {}).get(result.name) for result in results}
    return result_tables + [
        operations({title: cell[k] for title, cell in by_cell.items() if cell}, reference)
        for k in range(ratios)
    ]


def scores(results: Sequence[Result], baseline: Result) -> Table:
    """Return the table of held-out scores and gains."""
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
        difference = NONE if result is baseline else _signed(result.against.get(REWARD, NOTHING))
        rows.append((result.title, seeds, *cells, _value(result.within), difference))
    note = (
        "Score (gain over the same run before training), each ± its standard error over run seeds."
        " '± within a run': mean standard error of a run's gain, clustered by prompt. The last"
        " column is paired by run seed: same prompts, same seeds."
    )
    title = "Held-out score and gain over base"
    return Table(heads, rows, title=title, note=note, none=NOT_YET)


def seconds(results: Sequence[Result], baseline: Result) -> Table:
    """Return the table of seconds per iteration by stage."""
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
    """Return the table of training seconds until fractions of the baseline's gain are reached."""
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
            own_time, reference_time = result.reach.get(share), baseline.reach.get(share)
            factor = (
                f" ({_times(reference_time / own_time)})"
                if own_time and reference_time and result is not baseline
                else ""
            )
            cells.append(NONE if own_time is None else _seconds(own_time) + factor)
        rows.append((result.title, *cells))
    note = (
        f"Seconds until parts of the final gain of {baseline.title} were reached. Seconds are"
        " those of iterations, without startup and evaluations; curves are means over run seeds,"
        " linear between evaluations. '-': not reached."
    )
    return Table(heads, rows, title="Time to the baseline's gain", note=note, none=NOT_YET)


def operations(cells: Mapping[str, Cost], baseline: Result) -> Table:
    """Return the table of costs and gains at one ratio of quantized to unquantized operations."""
    base = cells[baseline.title]
    heads = (
        "operations",
        "per iteration, 1e12",
        f"over {baseline.title}'s",
        *(f"to {100 * share:.0f} % of its gain" for share in SHARES[1:]),
        *(f"gain at {part:g} of its operations, minus its own" for part in base.against),
    )
    rows = []
    for title, cell in cells.items():
        reached = []
        for share in SHARES[1:]:
            own_cost, base_cost = cell.reach[share], base.reach[share]
            factor = (
                f" ({own_cost / base_cost:.2f})"
                if own_cost and base_cost and cell is not base
                else ""
            )
            reached.append(NONE if own_cost is None else f"{own_cost / 1e12:.3g}{factor}")
        against = [_signed(value) for value in cell.against.values()]
        rows.append(
            (title, f"{cell.iteration / 1e12:.3g}", f"{cell.relative:.3f}", *reached, *against)
        )
    note = (
        "Operations of exploring, regenerating and updating, including decoding, two per"
        f" multiply-add, counted on the architecture; {base.ratio:g} quantized operations count as"
        f" one. In brackets: relative to {baseline.title}. Last columns: the gain after this part"
        " of the baseline's operations, minus the baseline's final gain, paired by run seed; '-':"
        " the run ended earlier."
    )
    title = f"Operations, quantized ones at {base.ratio:g}x"
    return Table(heads, rows, title=title, note=note, none=NOT_YET)


def lines(found: Sequence[Table], notes: Sequence[str]) -> list[str]:
    """Render the tables as aligned Markdown, followed by the remarks."""
    text: list[str] = []
    for table in found:
        rows = [[cell.text for cell in row] for row in table.body]
        title = f"{table.title}. {table.note}"
        text += ["", title, "", *markdown(table.heads, rows, numbers=True)]
    return [*text[1:], *([""] if notes else []), *(f"! {remark}" for remark in notes)]


def _title(name: str) -> str:
    return "reward" if name == REWARD else name.removeprefix(SCORER)


def _score(result: Result, name: str) -> str:
    score, gain = result.score.get(name, NOTHING), result.gain.get(name, NOTHING)
    return f"{_with_error(_value(score.mean), score)} ({_signed(gain)})" if score.count else NONE


def _signed(value: Mean) -> str:
    return _with_error(f"{value.mean:+.4f}", value) if value.count else NONE


def _value(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else NONE


def _with_error(text: str, value: Mean, to_text: Callable[[float], str] = _value) -> str:
    """Return ``text``, followed by the error of ``value`` if it is known."""
    return text + (f" ± {to_text(value.error)}" if math.isfinite(value.error) else "")


def _seconds(value: float) -> str:
    return f"{value:.{1 if value >= 9.995 else 2}f}" if math.isfinite(value) else NONE


def _times(value: float) -> str:
    return f"{value:.2f}x" if math.isfinite(value) else NONE
