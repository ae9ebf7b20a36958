"""Cost of an iteration in operations, of which quantized ones are cheaper on GPUs but not on a CPU.

Operations are counted on the architecture, as ``sol-rl plan`` does, two per multiplication and
addition. Exploring, regenerating and updating are counted, with their decoding; scoring and
publishing are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from analysis.compare.data import REWARD, Result, Run
from analysis.compare.statistics import (
    NOTHING,
    SHARES,
    Mean,
    Points,
    first_crossing,
    gain_at,
    paired,
)
from configs.schema import RunConfig

PART = 0.75
"""Fraction of the baseline's operations after which gains are compared with its final gain."""


@dataclass(frozen=True)
class Operations:
    """Operations of one iteration; ``quantized`` counts those in layers that run quantized."""

    unquantized: float
    quantized: float

    def at(self, ratio: float) -> float:
        """Return the equivalent number of unquantized operations.

        ``ratio`` quantized operations count as one unquantized operation.
        """
        return self.unquantized + self.quantized / ratio


@dataclass(frozen=True)
class Cost:
    """Operations of a cell at one ratio.

    ``iteration`` is the cost of an iteration and ``reach`` the cost of reaching each fraction of
    the baseline's gain. ``against`` maps a fraction of the baseline's total operations to the gain
    after that many operations minus the baseline's final gain, paired by run seed.
    """

    ratio: float
    iteration: float
    relative: float  # ``iteration`` divided by the baseline's
    reach: dict[float, float | None] = field(default_factory=dict)
    against: dict[float, Mean] = field(default_factory=dict)


def operations_of(config: RunConfig) -> Operations:
    """Count the operations of an iteration, or load the stored counts of a published architecture.

    Raises ConfigError or ValueError.
    """
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
    """Return cell name -> one cost per ratio, for every cell with counted runs.

    Returns an empty dict if the baseline has no counted runs.
    """
    reference = next(result for result in results if result.name == baseline)
    if not reference.counted:
        return {}
    return {
        result.name: [_cost(result, reference, counted, ratio) for ratio in ratios]
        for result in results
        if result.counted
    }


def _cost(
    result: Result, baseline: Result, counted: Mapping[str, Operations], ratio: float
) -> Cost:
    own_cost, baseline_cost = counted[result.name].at(ratio), counted[baseline.name].at(ratio)
    goal = baseline.gain.get(REWARD, NOTHING).mean
    mean = [(own_cost * m.iteration, m.gain.mean) for m in result.curves.get(REWARD, [])]
    ends = {
        run.seed: (baseline_cost * run.scores[REWARD][-1][0], run.gain(REWARD))
        for run in baseline.counted
    }
    return Cost(
        ratio,
        own_cost,
        own_cost / baseline_cost,
        {share: first_crossing(mean, share * goal) for share in SHARES},
        {
            fraction: paired(
                _gains(
                    result.counted,
                    own_cost,
                    {seed: fraction * end for seed, (end, _) in ends.items()},
                ),
                {seed: gain for seed, (_, gain) in ends.items()},
            )
            for fraction in (PART, 1.0)
        },
    )


def _gains(runs: Sequence[Run], iteration: float, ends: Mapping[int, float]) -> dict[int, float]:
    """Return run seed -> gain after ``ends[seed]`` operations.

    ``iteration`` is the cost of an iteration. Runs that ended earlier are left out.
    """
    gains: dict[int, float] = {}
    for run in runs:
        points: Points = [
            (iteration * updates, score - run.scores[REWARD][0][2])
            for updates, _, score in run.scores[REWARD]
        ]
        gain = gain_at(points, ends[run.seed]) if run.seed in ends else None
        if gain is not None:
            gains[run.seed] = gain
    return gains
