"""Results of the check: findings, and the outcome of each section."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from configs.section import Tree

State = Literal["done", "cut short", "failed", "not checkable here"]


@dataclass(frozen=True)
class Finding:
    """One measured number.

    ``labels`` identify it within its section. ``beside`` has numbers to compare it with: a bound, a
    prediction, a minimum and a maximum.
    """

    what: str
    value: float
    unit: str
    labels: dict[str, str] = field(default_factory=dict[str, str])
    beside: dict[str, float] = field(default_factory=dict[str, float])
    note: str = ""


@dataclass(frozen=True)
class LeftOut:
    """Something that a section did not measure, and why."""

    what: str
    why: str


Item = Finding | LeftOut


@dataclass
class Outcome:
    """The final state of a section, and everything that it measured."""

    section: str
    state: State = "done"
    why: str = ""
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list[Finding])
    left_out: list[LeftOut] = field(default_factory=list[LeftOut])

    def add(self, item: Item) -> None:
        """Append an item to ``findings`` or ``left_out``."""
        if isinstance(item, Finding):
            self.findings.append(item)
        else:
            self.left_out.append(item)


@dataclass(frozen=True)
class Results:
    """Outcomes of all sections of a check, with or without a GPU."""

    machine: Tree
    gpu: bool
    outcomes: Sequence[Outcome]

    def findings(self, section: str, **labels: str) -> list[Finding]:
        """Return the findings of a section that have these labels."""
        return [
            finding
            for outcome in self.outcomes
            if outcome.section == section
            for finding in outcome.findings
            if labels.items() <= finding.labels.items()
        ]


def from_tree(tree: Tree) -> Item:
    """Return the item that ``dataclasses.asdict`` turned into a tree."""
    return LeftOut(**tree) if "why" in tree else Finding(**tree)
