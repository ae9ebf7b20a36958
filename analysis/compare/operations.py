"""What an iteration costs in operations: quantized ones are cheaper on GPUs, but not on a CPU.

They are counted on the architecture, as ``sol-rl plan`` does, two per multiplication and addition:
those of exploring, regenerating and updating with their decodings, not of scoring and publishing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from analysis.compare.data import REWARD, Result, Run
from analysis.compare.statistics import NOTHING, SHARES, Mean, Points, at, first_at, paired
from configs.schema import RunConfig

PART = 0.75
"""The part of the baseline's operations after which gains are compared with its final one."""


@dataclass(frozen=True)
class Operations:
    """Operations of one iteration; ``quantized`` are those in layers that run quantized."""

    unquantized: float
    quantized: float

    def at(self, ratio: float) -> float:
        """In operations of the unquantized format, where it takes ``ratio`` quantized ones."""
        return self.unquantized + self.quantized / ratio


@dataclass(frozen=True)
class Cost:
    """A cell at one ratio: operations of an iteration and of reaching parts of the baseline's gain,
    and its gain less the baseline's final one after parts of the baseline's operations, paired by
    run seed.
    """

    ratio: float
    iteration: float
    relative: float  # the same over the baseline's
    reach: dict[float, float | None] = field(default_factory=dict)
    against: dict[float, Mean] = field(default_factory=dict)


def operations_of(config: RunConfig) -> Operations:
    """Counted, or as kept for a published architecture. Raises ConfigError, ValueError."""
    from planning.assumptions import backend_of
    from planning.counting import counts_of
    from planning.plan import open_architecture
    from planning.stages import stages_of

    with open_architecture(config) as (family, _):
        counts = counts_of(config, family, backend_of(config, None)[0])
    stages = stages_of(config, counts)[0].values()
    quantized = math.fsum(stage.quantized for stage in stages)
    return Operations(math.fsum(stage.flops for stage in stages) - quantized, quantized)


def costs(
    results: Sequence[Result],
    baseline: str,
    counted: Mapping[str, Operations],
    ratios: Sequence[float],
) -> dict[str, list[Cost]]:
    """A cost per ratio, by name of the cell, for every cell with counted runs."""
    one = next(result for result in results if result.name == baseline)
    if not one.counted:
        return {}
    return {
        result.name: [_cost(result, one, counted, ratio) for ratio in ratios]
        for result in results
        if result.counted
    }


def _cost(result: Result, one: Result, counted: Mapping[str, Operations], ratio: float) -> Cost:
    mine, theirs = counted[result.name].at(ratio), counted[one.name].at(ratio)
    goal = one.gain.get(REWARD, NOTHING).mean
    mean = [(mine * m.iteration, m.gain.mean) for m in result.curves.get(REWARD, [])]
    ends = {run.seed: (theirs * run.scores[REWARD][-1][0], run.gain(REWARD)) for run in one.counted}
    return Cost(
        ratio,
        mine,
        mine / theirs,
        {share: first_at(mean, share * goal) for share in SHARES},
        {
            part: paired(
                _gains(result.counted, mine, {seed: part * end for seed, (end, _) in ends.items()}),
                {seed: gain for seed, (_, gain) in ends.items()},
            )
            for part in (PART, 1.0)
        },
    )


def _gains(runs: Sequence[Run], iteration: float, ends: Mapping[int, float]) -> dict[int, float]:
    """The gain of each run after so many operations, by run seed; none where it ended before."""
    found: dict[int, float] = {}
    for run in runs:
        points: Points = [
            (iteration * updates, score - run.scores[REWARD][0][2])
            for updates, _, score in run.scores[REWARD]
        ]
        gain = at(points, ends[run.seed]) if run.seed in ends else None
        if gain is not None:
            found[run.seed] = gain
    return found
