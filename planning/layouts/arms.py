"""Compare the four arms on the same GPUs, each in its own best layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from configs.arms import Arm, set_arm
from configs.load import ConfigError, parse
from configs.schema import RunConfig
from planning.assumptions import Assumptions
from planning.layouts.choose import Candidate, assessed, choose
from planning.layouts.costs import Costs
from planning.layouts.gpus import Gpus
from planning.layouts.predict import Prediction
from planning.layouts.resolve import costs_of, needs_layout
from planning.layouts.scenario import Scenario, scenario_of
from planning.layouts.spec import configured_layout
from policy.families import Family

PAPER = {
    "black-forest-labs/FLUX.1-dev": (2.33, 1.62),
    "stabilityai/stable-diffusion-3.5-large": (2.41, 1.61),
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": (1.41, 1.25),
}
"""Published speedups of sol_rl over naive_scaling on eight B200, by model: (rollouts, whole
iterations). Source: arXiv 2604.06916.
"""
SIMPLER = {"sol_rl": ("naive_scaling",), "naive_quant": ("naive_scaling",)}
"""Simpler arms that an arm is meant to be faster than."""


@dataclass(frozen=True)
class Ratios:
    """Speedups of sol_rl over naive_scaling: predicted, and as published if the paper has them."""

    rollout: float
    whole: float
    paper: tuple[float, float] | None


@dataclass(frozen=True)
class Arms:
    """A configuration run as each arm: scenarios of the possible ones, reasons for the others."""

    found: Mapping[str, Scenario]
    why_not: Mapping[str, str]


def arms_of(config: RunConfig, family: Family, gpus: Sequence[Gpus], given: Assumptions) -> Arms:
    """Return ``config`` as each of the four arms, every one in its own layout.

    If durations were measured, only the configured arm is included: other arms make other calls.
    """
    scenarios: dict[str, Scenario] = {}
    why_not: dict[str, str] = {}
    for arm in (config.arm,) if given.measured else get_args(Arm):
        try:
            arm_config = _as(config, arm)
            costs = costs_of(arm_config, family, gpus, given)
            best = _laid_out(arm_config, gpus, costs)
        except ConfigError as error:
            why_not[arm] = error.lines[0]
            continue
        if best.prediction is None:
            why_not[arm] = best.why_not or "its layout has no prediction"
        else:
            scenarios[arm] = scenario_of(arm_config, best, family, gpus, given, costs)
    return Arms(scenarios, why_not)


def _laid_out(config: RunConfig, gpus: Sequence[Gpus], costs: Costs) -> Candidate:
    """Return the best layout, or the one that is configured explicitly. Raises DoesNotFit."""
    if needs_layout(config):
        return choose(config, gpus, costs).best
    return assessed(configured_layout(config), gpus, costs)


def _as(config: RunConfig, arm: str) -> RunConfig:
    """Return ``config`` with another arm. Raises ConfigError if that is invalid."""
    if arm == config.arm:
        return config
    # unset fields stay unset, so that numbers left to a layout do not count as set explicitly
    tree = config.model_dump(mode="json", exclude_unset=True)
    set_arm(tree, arm)
    return parse(tree)


def ratios(config: RunConfig, arms: dict[str, Prediction]) -> Ratios | None:
    """Return the speedups of ``sol_rl`` over ``naive_scaling``; None if either is missing."""
    if not {"sol_rl", "naive_scaling"} <= arms.keys():
        return None
    naive, sol_rl = arms["naive_scaling"], arms["sol_rl"]
    return Ratios(
        naive.rollout / sol_rl.rollout,
        naive.iteration / sol_rl.iteration,
        PAPER.get(config.model.path),
    )
