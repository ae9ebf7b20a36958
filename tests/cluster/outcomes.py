"""Results of a run with faults: what must be unchanged, and how long recovery took."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from records.rundir import RunDirectory
from tests.cluster.faults import SERVICES, TO_ACTORS, WORDS
from tests.cluster.runs import adapters

SAME = (
    "iteration",
    "kind",
    "samples_seen",
    "policy_version",
    "reward/",
    "explore/",
    "audit/",
    "rewards/failed",
    "loss/",
    "grad_norm",
    # fmt: skip
    "zero_std_ratio",
    "weights/version",
    "weights/bytes",
    "weights/delta_cosine",
    "weights/codes_changed",
    "eval/",
)
"""Metrics, or prefixes of their names, that do not depend on who computed what and when."""
WHEN_CHECKED = "audit/identity_error"
"""Metrics of the row in which an actor was checked; a replacement is checked again."""
DIGITS = 9
"""Compared digits of float64 means: sums in another order differ in the sixteenth."""


def outcome(run: RunDirectory, step: int) -> dict[str, str]:
    """Return SHA-256 hashes of all that must not depend on faults.

    They are of LoRA, old policy, EMA and optimizer at ``step``, of the selections, and of the rows
    of metrics, each of which counts its tasks once.
    """
    lora = b"".join(name.encode() + data for name, data in adapters(run, step).items())
    selections = run.selections_file
    parts = {
        "lora": lora,
        "selections": selections.read_bytes() if selections.exists() else b"",  # none explored
        "metrics": json.dumps(lasting(run.metrics())).encode(),
    }
    return {name: hashlib.sha256(data).hexdigest() for name, data in parts.items()}


def lasting(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics of every row that do not depend on which actor computed what (``SAME``).

    They are rounded to ``DIGITS`` digits.
    """

    def plain(value: Any) -> Any:
        return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value

    def lasts(key: str) -> bool:
        return key.startswith(SAME) and key != WHEN_CHECKED

    return [{key: plain(row[key]) for key in sorted(row) if lasts(key)} for row in rows]


@dataclass(frozen=True)
class Recovery:
    """Seconds from a fault until it was noticed, until the actor was replaced, and until the lost
    work was done.

    Work is done when another actor has answered the task or, after a loss of the learner, when its
    version is published again. None: the loss was never noticed.
    """

    kind: str
    way: str
    noticed_s: float | None = None
    replaced_s: float | None = None
    answered_s: float | None = None


def recoveries(events: Sequence[Mapping[str, Any]]) -> list[Recovery]:
    """Return one recovery per ``fault_injected`` among the events of a run."""
    found = []
    for place, fault in enumerate(events):
        if fault["event"] != "fault_injected":
            continue
        later, kind = events[place:], fault["kind"]

        def since(
            name: str,
            start: float = -1.0,
            fault: Mapping[str, Any] = fault,
            later: Any = later,
            **fields: Any,
        ) -> float | None:
            for event in later:
                mine = event["event"] == name and all(
                    event.get(key) == value for key, value in fields.items()
                )
                if mine and event["time"] - fault["time"] >= start:
                    return round(event["time"] - fault["time"], 3)
            return None

        who = {"kind": kind, "actor": fault["actor"]}
        if fault["way"] not in TO_ACTORS:  # the first actor that is lost, if any
            first = next((event for event in later if event["event"] == "actor_died"), None)
            if fault["way"] != "monitor" or first is None:
                continue
            kind = first["kind"]
            who = {"kind": kind, "actor": first["actor"]}
        noticed = since("actor_died", **who)
        replaced = answered = None
        if noticed is not None:
            replaced = since("actor_replaced", noticed, **who)
            restored = since("learner_restored", noticed)
            answered = since("chunk_recovered", noticed, kind=kind) if kind != "learner" else None
            # what was lost with a node may send the run back to its checkpoint
            if answered is None and restored is not None:
                answered = since("version_published", restored)
        found.append(Recovery(kind, fault["way"], noticed, replaced, answered))
    return found


def recovery_table(found: Sequence[Recovery]) -> list[str]:
    """Return a Markdown table: medians, with the largest in brackets, by service and kind of
    fault.
    """
    lines = [
        "| hit | how | times | noticed | replaced | answered or restored |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kind in SERVICES:
        for way in WORDS:
            mine = [each for each in found if (each.kind, each.way) == (kind, way)]
            if mine:
                cells = [
                    _cell([getattr(each, name) for each in mine])
                    for name in ("noticed_s", "replaced_s", "answered_s")
                ]
                lines.append(f"| {kind} | {way} | {len(mine)} | {' | '.join(cells)} |")
    return lines


def _cell(values: Sequence[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    if not known:
        return "not needed"
    return f"{statistics.median(known):.1f} s" + (f" ({known[-1]:.1f} s)" if len(known) > 1 else "")
