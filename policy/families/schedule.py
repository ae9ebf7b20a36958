"""Sigma schedules of diffusers' flow-matching Euler scheduler, shared by families."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from configs.section import Tree
from policy.families.pipeline import TIMESTEPS, Diffusers


def unit_timestep(sigma: Tensor, x: Tensor) -> Tensor:
    """sigma as float32 [B] for x [B, ...], times 1000 and divided again as the pipelines do it."""
    return (sigma.to(x.device, torch.float32) * TIMESTEPS / TIMESTEPS).expand(len(x))


def require_steps(steps: int) -> None:
    """Raises ValueError for less than one sampling step."""
    if steps < 1:
        raise ValueError(f"{steps} sampling steps: at least 1 is needed")


def multistep_sigmas(config: Tree, steps: int, shift: float | None, name: str) -> Tensor:
    """float32 [steps + 1] of one of diffusers' multistep schedulers, of class ``name``.

    It must be configured for flow matching; ``shift`` replaces the configuration's own. Raises
    ValueError.
    """
    import diffusers

    require_steps(steps)
    if not config.get("use_flow_sigmas") or config.get("prediction_type") != "flow_prediction":
        raise ValueError(
            f"model.path: the {name} has no flow sigmas: this is no flow-matching model"
        )
    if shift is not None:
        config = {**config, "flow_shift": shift}
    scheduler: Diffusers = getattr(diffusers, name).from_config(config)
    scheduler.set_timesteps(steps)
    return scheduler.sigmas.to("cpu", torch.float32).clone()


def whole_timestep(sigma: Tensor) -> Tensor:
    """float32 in [0, 1000], rounded towards zero as multistep schedulers round their own.

    They round before they cast sigma to float32. A test holds that both agree for every shift above
    1; at shift 1 exact thousandths occur, and there the two may differ by one timestep.
    """
    return (sigma.double() * TIMESTEPS).floor().float()


def even_spacing(steps: int) -> list[float]:
    """linspace(1, 1/steps, steps)."""
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
    """float32 [steps + 1]: ``spacing(steps)`` as the scheduler shifts it, and 0.

    The scheduler's own default spacing, ``schedule`` "scheduler", ends below sigma = shift / (999 +
    shift), which wastes the last step; the stock SD3 pipeline and the reference code have it.
    "uniform" is linspace(1, 0, steps + 1). Neither asks ``spacing``. ``shift`` replaces the
    configuration's own; without it a dynamic shift is that of ``tokens`` image tokens by the
    pipeline's ``calculate_shift``, None where the pipeline knows none. Raises ValueError.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    require_steps(steps)
    if schedule == "uniform":
        return torch.linspace(1.0, 0.0, steps + 1)
    if steps == 1 and config.get("shift_terminal"):
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
                "scheduler: use_dynamic_shifting, which this model's pipeline cannot do: set"
                " model.shift"
            )
        names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        mu = calculate_shift(tokens, *(scheduler.config[name] for name in names))
    if schedule == "scheduler":
        scheduler.set_timesteps(steps, mu=mu)
    else:
        scheduler.set_timesteps(sigmas=spacing(steps), mu=mu)
    return scheduler.sigmas.to("cpu", torch.float32).clone()
