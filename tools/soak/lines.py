"""Rows of a soak as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from records.tables import markdown
from tests.cluster.outcomes import Recovery, recovery_table

Row = dict[str, Any]
"""A line of faults.jsonl: settings, faults, whether the run ended as it should, and times."""


def identical(row: Row) -> bool:
    """Whether the run ended as the undisturbed one did, and no killed process is left over."""
    return not row["differs"] and not row["left_over"]


def line_of(row: Row) -> str:
    """A row as a line to read."""
    came = (
        "identical"
        if identical(row)
        else f"DIFFERS: {', '.join(row['differs'])}{' left over' * bool(row['left_over'])}"
    )
    if len(row["done"]) < len(row["faults"]):
        came += f", {len(row['done'])} of {len(row['faults'])} faults: the actor was just being"
        came += " replaced, or the run had ended"
    parts = [("noticed", "noticed_s"), ("replaced", "replaced_s"), ("recovered", "answered_s")]
    said = [
        f"{word} {times[key]:.1f} s"
        for times in row["recovery"]
        for word, key in parts
        if times.get(key) is not None
    ]
    if row["ended_s"] is not None:
        said.append(f"ended after {row['ended_s']:.1f} s and was resumed")
    why = f"; {row['why']}" if "why" in row else ""
    return (
        f"{row['index']:4}  {came}  {row['variant']}: {'; '.join(row['faults'])};"
        f" {', '.join(said) or 'not needed again'}; run {row['seconds']:.0f} s{why}"
    )


def summary(rows: Sequence[Row]) -> list[str]:
    """The tables of recovery times and of ways, and how many runs ended identical."""
    found = [Recovery(**times) for row in rows for times in row["recovery"]]
    same = sum(identical(row) for row in rows)
    hit, two = (sum(len(row["done"]) >= count for row in rows) for count in (1, 2))
    late = sum(each.noticed_s > 5 for each in found if each.way == "node" and each.noticed_s)
    nodes = sum(each.way == "node" and each.noticed_s is not None for each in found)
    return [
        *recovery_table(found),
        "",
        *_by_way(rows),
        "",
        f"{nodes - late} of {nodes} lost nodes were noticed within 5 s",
        f"{same} of {len(rows)} runs ended identical to the undisturbed one; {hit} had a fault,"
        f" {two} of them two",
    ]


def _by_way(rows: Sequence[Row]) -> list[str]:
    """How often each way was done, and how the runs ended in which it was."""
    body: list[list[str]] = []
    names = sorted({way for row in rows for way in row["done"]})
    names += sorted({row["variant"] for row in rows})
    for name in names:
        mine = [row for row in rows if name in (*row["done"], row["variant"])]
        seconds = [row["seconds"] for row in mine]
        took = f"{statistics.median(seconds):.0f} ({max(seconds):.0f})"
        body.append([name, str(len(mine)), str(sum(map(identical, mine))), took])
    return markdown(["fault or setting", "runs", "identical", "seconds of a run"], body)
