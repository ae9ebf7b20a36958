"""What sections of the check hand over: findings, and what became of each section."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from configs.section import Tree

State = Literal["done", "cut short", "failed", "not checkable here"]


@dataclass(frozen=True)
class Finding:
    """One number. ``labels`` tell it from others of its section, ``beside`` are numbers to hold it
    against: a bound, a prediction, a smallest and a largest.
    """

    what: str
    value: float
    unit: str
    labels: dict[str, str] = field(default_factory=dict[str, str])
    beside: dict[str, float] = field(default_factory=dict[str, float])
    note: str = ""


@dataclass(frozen=True)
class LeftOut:
    """What a section did not do, and why."""

    what: str
    why: str


Item = Finding | LeftOut


@dataclass
class Outcome:
    """A section's end, with everything that it found before that."""

    section: str
    state: State = "done"
    why: str = ""
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list[Finding])
    left_out: list[LeftOut] = field(default_factory=list[LeftOut])

    def add(self, item: Item) -> None:
        """Keep what came."""
        if isinstance(item, Finding):
            self.findings.append(item)
        else:
            self.left_out.append(item)


@dataclass(frozen=True)
class Results:
    """All sections of a check, on a GPU or not."""

    machine: Tree
    gpu: bool
    outcomes: Sequence[Outcome]

    def findings(self, section: str, **labels: str) -> list[Finding]:
        """The findings of a section that have these labels."""
        return [
            found
            for outcome in self.outcomes
            if outcome.section == section
            for found in outcome.findings
            if labels.items() <= found.labels.items()
        ]


def from_tree(tree: Tree) -> Item:
    """The inverse of ``asdict``."""
    return LeftOut(**tree) if "why" in tree else Finding(**tree)
