"""The four arms on the same GPUs, each in its own best layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from configs.arms import Arm
from configs.load import ConfigError, parse
from configs.schema import RunConfig
from planning.assumptions import Assumptions
from planning.layouts.choose import Candidate, assessed, choose
from planning.layouts.costs import Costs
from planning.layouts.gpus import Gpus
from planning.layouts.numbers import numbers_of
from planning.layouts.predict import Prediction
from planning.layouts.resolve import costs_of, to_choose
from planning.layouts.scenario import Scenario, scenario_of
from policy.families import Family

PAPER = {
    "black-forest-labs/FLUX.1-dev": (2.33, 1.62),
    "stabilityai/stable-diffusion-3.5-large": (2.41, 1.61),
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": (1.41, 1.25),
}
"""naive_scaling's seconds over sol_rl's on eight B200, of rollouts and of whole iterations, as
arXiv 2604.06916 states them.
"""
SIMPLER = {"sol_rl": ("naive_scaling",), "naive_quant": ("naive_scaling",)}
"""Arms that an arm is there to be faster than."""


@dataclass(frozen=True)
class Ratios:
    """naive_scaling's seconds over sol_rl's: predicted, and as the paper has them, where it has."""

    rollout: float
    whole: float
    paper: tuple[float, float] | None


@dataclass(frozen=True)
class Arms:
    """A configuration as every arm: those that can be, and a line of why the others cannot."""

    found: Mapping[str, Scenario]
    why_not: Mapping[str, str]


def arms_of(config: RunConfig, family: Family, gpus: Sequence[Gpus], given: Assumptions) -> Arms:
    """``config`` as each of the four arms, in that arm's own layout; as its own alone where calls
    were measured, which other arms do not make alike.
    """
    found: dict[str, Scenario] = {}
    why_not: dict[str, str] = {}
    for arm in (config.arm,) if given.measured else get_args(Arm):
        try:
            other = _as(config, arm)
            costs = costs_of(other, family, gpus, given)
            best = _laid_out(other, gpus, costs)
        except ConfigError as error:
            why_not[arm] = error.lines[0]
            continue
        if best.prediction is None:
            why_not[arm] = best.why_not or "nothing is predicted of its layout"
        else:
            found[arm] = scenario_of(other, best, family, gpus, given, costs)
    return Arms(found, why_not)


def _laid_out(config: RunConfig, gpus: Sequence[Gpus], costs: Costs) -> Candidate:
    """In the best layout, or in the one that is given by hand. Raises DoesNotFit."""
    if to_choose(config):
        return choose(config, gpus, costs).best
    return assessed(numbers_of(config), gpus, costs)


def _as(config: RunConfig, arm: str) -> RunConfig:
    """``config`` as another arm. Raises ConfigError where that cannot be."""
    if arm == config.arm:
        return config
    changed: dict[str, object] = {"arm": arm}
    other = config.model_copy(update=changed)
    if other.plan.explore is None or not other.plan.regenerate:
        plain = config.audit.model_copy(
            update={
                "random_seeds": 0,
                "min_sign_agreement": None,
                "min_tau": None,
                "action": "warn",
            }
        )
        changed |= {"explore_ahead": 0, "audit": plain}
        other = config.model_copy(update=changed)
    # what is not written stays unwritten: a number that a layout has yet to choose is none by hand
    parse(other.model_dump(mode="json", exclude_unset=True))
    return other


def ratios(config: RunConfig, arms: dict[str, Prediction]) -> Ratios | None:
    """How much faster ``sol_rl`` is than ``naive_scaling``; None where either is not there."""
    if not {"sol_rl", "naive_scaling"} <= arms.keys():
        return None
    naive, ours = arms["naive_scaling"], arms["sol_rl"]
    return Ratios(
        naive.rollout / ours.rollout, naive.iteration / ours.iteration, PAPER.get(config.model.path)
    )
