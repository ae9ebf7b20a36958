"""Input of a simulation: a configuration in a layout, with the durations of its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from configs.load import ConfigError
from configs.schema import RunConfig
from planning.assumptions import Assumptions
from planning.durations import Durations, Line, of_tasks
from planning.layouts.choose import Candidate, Choice, choose
from planning.layouts.costs import Costs
from planning.layouts.gpus import GpuAssignment, Gpus, assign_gpus
from planning.layouts.predict import Prediction
from planning.layouts.resolve import costs_of, on_kind
from planning.layouts.spec import with_layout
from policy.families import Family

NODE_GPUS = 8
"""GPUs per node that are assumed for the time of publishing."""


@dataclass(frozen=True)
class Scenario:
    """A run in a layout, ready to be simulated.

    ``durations`` is by kind of GPU; ``prediction`` is the analytical one.
    """

    config: RunConfig
    assigned: Sequence[GpuAssignment]
    durations: Mapping[str, Durations]
    sent: int  # bytes that are published after an update
    prediction: Prediction

    @property
    def shards(self) -> int:
        """Number of shards in which weights are published."""
        return max(1, -(-self.sent // (self.config.publish.shard_mb << 20)))

    @property
    def free(self) -> Scenario:
        """The same scenario with exploring that takes no time."""
        durations = {kind: replace(each, explore=Line()) for kind, each in self.durations.items()}
        return replace(self, durations=durations)


@dataclass(frozen=True)
class Scenarios:
    """The scenarios that a plan simulates.

    ``mine``: the run itself; ``arms``: the run with other arms; ``more``: the run with one more GPU
    of each kind; ``table``: every layout of the choice's table that fits, in the same order.
    """

    mine: Scenario
    arms: Mapping[str, Scenario]
    more: Mapping[str, Scenario]
    table: Sequence[Scenario]


def scenario_of(
    config: RunConfig,
    found: Candidate,
    family: Family,
    gpus: Sequence[Gpus],
    given: Assumptions,
    costs: Costs,
) -> Scenario:
    """Return the scenario of a layout that fits, with durations from ``costs``."""
    assigned = assign_gpus(found.numbers, gpus)
    assert assigned is not None and found.prediction is not None
    kinds = [each.kind for each in gpus]
    counts = {kind: on_kind(config, family, kind, given)[2] for kind in kinds}
    nodes = -(-sum(each.count for each in gpus) // NODE_GPUS)
    config = with_layout(config, found.numbers)
    durations = {kind: of_tasks(config, costs.tasks[kind], counts[kind], nodes) for kind in kinds}
    for kind, calls in (given.measured or {}).items():
        summing, move = durations[kind].summing, durations[kind].move
        durations[kind] = replace(calls, summing=summing, move=move)
    explores = config.plan.explore is not None
    sent = counts[kinds[0]].changing if explores else 0
    return Scenario(config, assigned, durations, sent, found.prediction)


def chosen(
    config: RunConfig, family: Family, gpus: Sequence[Gpus], given: Assumptions
) -> tuple[Scenario, Choice]:
    """Return (scenario in the layout that is chosen for ``gpus``, the choice).

    Raises ConfigError, with one line, if no layout fits.
    """
    costs = costs_of(config, family, gpus, given)
    choice = choose(config, gpus, costs)
    return scenario_of(config, choice.best, family, gpus, given, costs), choice


def one_more(
    config: RunConfig, family: Family, gpus: Sequence[Gpus], given: Assumptions
) -> dict[str, Scenario]:
    """Return the scenario of the best layout with one more GPU, by its kind.

    A kind for which explicitly configured values leave no fitting layout is left out.
    """
    scenarios = {}
    layout = config.layout
    if layout is not None and layout.gpus is not None:
        layout = layout.model_copy(update={"gpus": layout.gpus + 1})
        config = config.model_copy(update={"layout": layout})
    for each in gpus:
        more = [replace(other, count=other.count + (other is each)) for other in gpus]
        try:
            scenarios[each.kind], _ = chosen(config, family, more, given)
        except ConfigError:
            continue
    return scenarios
