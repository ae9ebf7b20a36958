"""Formatting of soak results: one line per run, and summary tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from records.tables import markdown
from tests.cluster.outcomes import Recovery, recovery_table

Row = dict[str, Any]
"""A row of faults.jsonl: settings, faults, how the run differs from the undisturbed one, times."""


def identical(row: Row) -> bool:
    """Return True if the run ended like the undisturbed one and left no killed process behind."""
    return not row["differs"] and not row["left_over"]


def line_of(row: Row) -> str:
    """Format a row as one line of text."""
    verdict = (
        "identical"
        if identical(row)
        else f"DIFFERS: {', '.join(row['differs'])}{' left over' * bool(row['left_over'])}"
    )
    if len(row["done"]) < len(row["faults"]):
        verdict += f", {len(row['done'])} of {len(row['faults'])} faults: the actor was being"
        verdict += " replaced, or the run had ended"
    phases = [("noticed", "noticed_s"), ("replaced", "replaced_s"), ("recovered", "answered_s")]
    timings = [
        f"{label} {times[key]:.1f} s"
        for times in row["recovery"]
        for label, key in phases
        if times.get(key) is not None
    ]
    if row["ended_s"] is not None:
        timings.append(f"ended after {row['ended_s']:.1f} s and was resumed")
    reason = f"; {row['why']}" if "why" in row else ""
    return (
        f"{row['index']:4}  {verdict}  {row['variant']}: {'; '.join(row['faults'])};"
        f" {', '.join(timings) or 'not needed again'}; run {row['seconds']:.0f} s{reason}"
    )


def summary(rows: Sequence[Row]) -> list[str]:
    """Return tables of recovery times and fault types, and how many runs ended identical."""
    recovered = [Recovery(**times) for row in rows for times in row["recovery"]]
    same = sum(identical(row) for row in rows)
    hit, two = (sum(len(row["done"]) >= count for row in rows) for count in (1, 2))
    late = sum(each.noticed_s > 5 for each in recovered if each.way == "node" and each.noticed_s)
    nodes = sum(each.way == "node" and each.noticed_s is not None for each in recovered)
    return [
        *recovery_table(recovered),
        "",
        *_by_way(rows),
        "",
        f"{nodes - late} of {nodes} lost nodes were noticed within 5 s",
        f"{same} of {len(rows)} runs ended identical to the undisturbed one; {hit} had a fault,"
        f" {two} of them two",
    ]


def _by_way(rows: Sequence[Row]) -> list[str]:
    """Return a table with one row per fault type and per variant: runs, identical runs, seconds."""
    body: list[list[str]] = []
    names = sorted({way for row in rows for way in row["done"]})
    names += sorted({row["variant"] for row in rows})
    for name in names:
        matching = [row for row in rows if name in (*row["done"], row["variant"])]
        seconds = [row["seconds"] for row in matching]
        duration = f"{statistics.median(seconds):.0f} ({max(seconds):.0f})"
        body.append([name, str(len(matching)), str(sum(map(identical, matching))), duration])
    return markdown(["fault or setting", "runs", "identical", "seconds of a run"], body)
