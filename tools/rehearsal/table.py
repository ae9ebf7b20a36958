"""Measured and planned, side by side."""

from __future__ import annotations

from analysis.report.parts import Table
from planning.make import Plan
from tools.rehearsal.measuring import Measured

TOLERANCE = 0.05
GB = 1e9


def table(plan: Plan, found: Measured) -> tuple[Table, list[str]]:
    """(measured against planned, lines about what is more than the tolerance away)."""
    rows, off = [], []

    def row(what: str, measured: int, planned: int, process: str = "") -> None:
        share = measured / planned if planned else float("nan")
        if not abs(share - 1) <= TOLERANCE:
            off.append(f"{what}: {share:.3f} of the plan")
        numbers = (f"{measured / GB:.3f}", f"{planned / GB:.3f}", f"{share:.3f}", process)
        rows.append((what, *numbers))

    for kind, parts in plan.memory.items():
        if kind in found.tensors:
            own = max(0, found.process.get(kind, 0) - found.libraries) / GB
            kept = {what: size or 0 for what, size in parts.items() if "passes" not in what}
            passes = sum(size or 0 for what, size in parts.items() if "passes" in what) / GB
            beside = f"{own:.3f}, planned with passes {sum(kept.values()) / GB + passes:.3f}"
            row(kind, found.tensors[kind], sum(kept.values()), beside)
    row("broadcast", found.broadcast, plan.broadcast)
    row("object store, at most", found.store, sum(plan.store.values()))
    heads = ("", "measured, GB", "planned, GB", "measured / planned", "process, GB")
    took = f"in {found.seconds / 60:.1f} minutes, at most {found.at_once / GB:.1f} GB at once"
    title = f"Measured and planned, {took}"
    return Table(heads, rows, words=(0, 4), title=title), off
