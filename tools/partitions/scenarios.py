"""Scenarios: a training run each, and the network faults that occur during it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.partitions.lab import EXPLORERS, HEAD, LEARNERS, Lab

CUT_S = 30.0
PINNED = {"services__rollout__actors": 1, "services__rollout__labels": {"host": "one"}}
WIDE = {"wide": True}
"""Use a model whose weights are separate objects in the object store.

Ray sends objects of less than 100 kB inline with messages, through the driver, and so not over the
link that is cut.
"""
GROUP = {"services__learner__replicas": 2, "services__learner__strategy": "spread"}

SHARED = {"-group": GROUP, "-wide": WIDE}
"""Settings that change results; each needs an undisturbed run of its own to compare with."""


@dataclass(frozen=True)
class Scenario:
    """A run and the faults in its network.

    ``at`` is the (iteration, moment) that triggers ``acts``, each after its delay in seconds; None
    applies them before the run starts.
    """

    name: str
    acts: Sequence[tuple[float, Callable[[Lab], None]]]
    at: tuple[int, str] | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    hit: str = "rollout"


def everywhere(**rule: float) -> tuple[float, Callable[[Lab], None]]:
    """Return an action that applies ``rule`` to all links at once."""
    return 0.0, lambda lab: lab.network.everywhere(**rule)


def cut(ones: Sequence[str], others: Sequence[str]) -> tuple[float, Callable[[Lab], None]]:
    """Return an action that cuts all links between two groups of nodes."""
    return 0.0, lambda lab: lab.network.between(ones, others, cut=True)


HEAL = (CUT_S, lambda lab: lab.network.everywhere())
SLOW = everywhere(delay_s=0.05, loss=0.01)
SCENARIOS = {
    "slow": Scenario("50 ms and 1 % loss everywhere", [SLOW]),
    "narrow": Scenario("100 Mbit/s everywhere", [everywhere(bytes_per_s=12.5e6)], None, WIDE),
    "head-30": Scenario(
        "head and explorer cut for 30 s, no spare node",
        [cut([HEAD], ["one"]), HEAL],
        (0, "explored"),
        PINNED,
    ),
    "head-ever": Scenario(
        "head and one explorer cut for good", [cut([HEAD], ["one"])], (0, "explored")
    ),
    "learner-30": Scenario(
        "learner and both explorers cut for 30 s, while weights are sent",
        [cut(LEARNERS, EXPLORERS), HEAL],
        (0, "export"),
        WIDE,
    ),
    "learner-ever": Scenario(
        "learner and one explorer cut for good, while weights are sent",
        [cut(LEARNERS, ["one"])],
        (0, "export"),
        WIDE,
    ),
    "back": Scenario(
        "an explorer's node switched off, back after 30 s, no spare node",
        [(0.0, lambda lab: lab.off("one")), (CUT_S, lambda lab: lab.on("one"))],
        (0, "explored"),
        PINNED,
    ),
    "group-slow": Scenario("two learner replicas, 50 ms and 1 % loss", [SLOW], None, GROUP),
    "group-30": Scenario(
        "two learner replicas cut from each other for 30 s",
        [cut(["learner"], ["second"]), HEAL],
        (1, "regenerated"),  # the update comes next
        GROUP,
        "learner",
    ),
}
