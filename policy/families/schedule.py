"""Sigma schedules and timesteps of diffusers' flow-matching schedulers, shared by families."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from configs.section import Tree
from policy.families.pipeline import TIMESTEPS, Diffusers


def unit_timestep(sigma: Tensor, x: Tensor) -> Tensor:
    """Return sigma as float32 [B] for x [B, ...].

    It is multiplied by 1000 and divided again, to round as the stock pipelines do.
    """
    return (sigma.to(x.device, torch.float32) * TIMESTEPS / TIMESTEPS).expand(len(x))


def require_steps(steps: int) -> None:
    """Raise ValueError for less than one sampling step."""
    if steps < 1:
        raise ValueError(f"{steps} sampling steps: at least 1 is needed")


def fewest_steps(config: Tree, schedule: str) -> int:
    """Return the smallest number of sampling steps with which ``flow_match_sigmas`` is defined."""
    return 2 if schedule != "uniform" and config.get("shift_terminal") else 1


def multistep_sigmas(config: Tree, steps: int, shift: float | None, name: str) -> Tensor:
    """Return the sigmas of diffusers' multistep scheduler of class ``name``: float32 [steps + 1].

    ``shift`` overrides that of the configuration. Raises ValueError unless the scheduler is
    configured for flow matching.
    """
    import diffusers

    require_steps(steps)
    if not config.get("use_flow_sigmas") or config.get("prediction_type") != "flow_prediction":
        raise ValueError(
            f"model.path: the {name} has no flow sigmas: it is not a flow-matching model"
        )
    if shift is not None:
        config = {**config, "flow_shift": shift}
    scheduler: Diffusers = getattr(diffusers, name).from_config(config)
    scheduler.set_timesteps(steps)
    return scheduler.sigmas.to("cpu", torch.float32).clone()


def whole_timestep(sigma: Tensor) -> Tensor:
    """Return the timestep of sigma as a whole float32 in [0, 1000], rounded towards zero.

    Multistep schedulers round in the same way, but before they cast sigma to float32. A test
    verifies that both agree for every shift above 1. At shift 1 sigmas that are exact thousandths
    occur, for which they may differ by one timestep.
    """
    return (sigma.double() * TIMESTEPS).floor().float()


def even_spacing(steps: int) -> list[float]:
    """Return linspace(1, 1 / steps, steps)."""
    return np.linspace(1.0, 1.0 / steps, steps).tolist()


def flow_match_sigmas(
    config: Tree,
    steps: int,
    shift: float | None,
    calculate_shift: Callable[..., float] | None = None,
    tokens: int = 0,
    schedule: str = "own",
    spacing: Callable[[int], list[float]] = even_spacing,
) -> Tensor:
    """Return the sigmas of diffusers' Euler scheduler: float32 [steps + 1], the last is 0.

    By default they are ``spacing(steps)``, shifted by the scheduler, and 0. ``schedule``
    "scheduler" is the scheduler's default spacing, which the stock SD3 pipeline and the reference
    code use; it ends below sigma = shift / (999 + shift), which wastes the last step. "uniform" is
    linspace(1, 0, steps + 1). Neither uses ``spacing``.

    ``shift`` overrides that of the configuration. Without it, a scheduler with dynamic shifting
    uses the pipeline's ``calculate_shift`` for ``tokens`` image tokens; pass None if the pipeline
    has no such function. Raises ValueError if the schedule is not possible.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    require_steps(steps)
    if schedule == "uniform":
        return torch.linspace(1.0, 0.0, steps + 1)
    if steps < fewest_steps(config, schedule):
        raise ValueError(
            "1 sampling step: this model's scheduler stretches the schedule to a last sigma above 0"
            " (shift_terminal), and needs at least 2"
        )
    if shift is not None:
        config = {**config, "shift": shift, "use_dynamic_shifting": False}
    scheduler: Diffusers = FlowMatchEulerDiscreteScheduler.from_config(config)
    mu = None
    if scheduler.config.use_dynamic_shifting:
        if calculate_shift is None:
            raise ValueError(
                "scheduler: use_dynamic_shifting is not supported by this model's pipeline: set"
                " model.shift"
            )
        names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        mu = calculate_shift(tokens, *(scheduler.config[name] for name in names))
    if schedule == "scheduler":
        scheduler.set_timesteps(steps, mu=mu)
    else:
        scheduler.set_timesteps(sigmas=spacing(steps), mu=mu)
    return scheduler.sigmas.to("cpu", torch.float32).clone()
