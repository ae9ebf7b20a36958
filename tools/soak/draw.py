"""Random choice of the settings and faults of run i of a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from tests.cluster.faults import RECOVERING, RUN, TO_ACTORS, Fault, Way

WAYS = ("kill", "stop", "node", "memory", "monitor", "disk", "driver", "clock", "scale")
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "ahead": ("explore_ahead=1",),
    "replicas": ("services.learner.replicas=2",),
    "ahead and replicas": ("explore_ahead=1", "services.learner.replicas=2"),
}
"""Overrides of each variant, on top of the smallest configuration."""
LONGEST_DELAY_S = 0.3
STOPPED_S = (2.0, 20.0)
"""Seconds for which the driver is stopped: below and above the deadline of most actors."""
JUMPS_S = (-3600.0, -5.0, 5.0, 3600.0)
SIZES = (1, 3)
"""Numbers of rollout actors to scale to; a run starts with two."""
Moments = Mapping[tuple[int, str], int]
"""Maps (iteration, moment) to how often it occurs in an undisturbed run."""


@dataclass(frozen=True)
class Trial:
    """Variant and faults of one run."""

    variant: str
    faults: tuple[Fault, ...]


def draw(
    seed: int, index: int, moments: Mapping[str, Moments], kinds: Sequence[str], ways: Sequence[str]
) -> Trial:
    """Draw the variant and faults of run ``index``, given the moments of each variant's run."""
    rng = np.random.default_rng([seed, index])
    variant = sorted(moments)[int(rng.integers(len(moments)))]
    faults = [_fault(rng, variant, moments[variant], kinds, ways)]
    if rng.integers(2):
        second = _fault(rng, variant, moments[variant], kinds, ways)
        # a first fault that ends no actor has no recovery during which the second can occur
        if faults[0].way in (*TO_ACTORS, "monitor") and rng.integers(2):
            second = replace(second, iteration=-1, moment=RECOVERING, count=1)
        # filling the disk a second time would have no effect
        if {each.way for each in (faults[0], second)} != {"disk"}:
            faults.append(second)
    return Trial(variant, tuple(faults))


def _fault(
    rng: np.random.Generator,
    variant: str,
    moments: Moments,
    kinds: Sequence[str],
    ways: Sequence[str],
) -> Fault:
    """Draw the target, type, moment, delay and amount of one fault."""
    kind, way = kinds[int(rng.integers(len(kinds)))], ways[int(rng.integers(len(ways)))]
    iteration, moment = sorted(moments)[int(rng.integers(len(moments)))]
    count = 1 + int(rng.integers(moments[iteration, moment]))
    has_two = kind == "rollout" or (kind == "learner" and "replicas" in variant)
    actor = int(rng.integers(2)) if has_two else 0
    delay = round(float(rng.uniform(0, LONGEST_DELAY_S)), 3)
    amounts = {"driver": STOPPED_S, "clock": JUMPS_S, "scale": SIZES}.get(way, (0.0,))
    amount = float(amounts[int(rng.integers(len(amounts)))])
    if way not in TO_ACTORS:
        kind, actor = RUN, 0
    typed_way = cast(Way, way)
    return Fault(kind, typed_way, iteration, moment, count, actor, delay, amount=amount)
