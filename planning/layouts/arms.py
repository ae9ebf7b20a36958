"""The four arms on the same GPUs, each in its own best layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from configs.arms import Arm
from configs.load import ConfigError, parse
from configs.schema import RunConfig
from planning.assumptions import Assumptions
from planning.layouts.choose import Candidate, assessed, choose
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


def arms_of(
    config: RunConfig, family: Family, gpus: Sequence[Gpus], given: Assumptions
) -> dict[str, Scenario]:
    """Every arm that ``config`` can be run as and that fits, in its layout."""
    found = {}
    for arm in get_args(Arm):
        other = _as(config, arm)
        if other is None:
            continue
        costs = costs_of(other, family, gpus, given)
        best: Candidate
        if to_choose(other):
            try:
                best = choose(other, gpus, costs).best
            except ConfigError:
                continue
        else:
            best = assessed(numbers_of(other), gpus, costs)
        if best.prediction is not None:
            found[arm] = scenario_of(other, best, family, gpus, given, costs)
    return found


def _as(config: RunConfig, arm: str) -> RunConfig | None:
    """``config`` as another arm; None where its objective does not go with it."""
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
    try:
        parse(other.model_dump(mode="json"))
    except ConfigError:
        return None
    return other


def ratios(config: RunConfig, arms: dict[str, Prediction]) -> Ratios | None:
    """How much faster ``sol_rl`` is than ``naive_scaling``; None where either is not there."""
    if not {"sol_rl", "naive_scaling"} <= arms.keys():
        return None
    naive, ours = arms["naive_scaling"], arms["sol_rl"]
    return Ratios(
        naive.rollout / ours.rollout, naive.iteration / ours.iteration, PAPER.get(config.model.path)
    )
