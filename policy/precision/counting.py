"""Counting of one denoiser call on tensors without data (``cost.Step``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from configs.schema import RunConfig
from policy.families import family_for
from policy.families.base import Family
from policy.meta import meta_denoiser
from policy.pass_cost import denoiser_cost, groups_of
from policy.precision.base import Backend
from policy.precision.cost import Step
from policy.precision.swap import quantize_plan


def step_of(
    family: Family,
    transformer: nn.Module,
    backend: Backend,
    batch: int,
    modules_to_not_convert: Sequence[str] = (),
) -> Step:
    """Return the cost of one call for ``batch`` images at the family's size, all text tokens used.

    ``transformer`` is unquantized and in bfloat16 on the meta device.
    """
    plan = quantize_plan(transformer, family, modules_to_not_convert, backend)
    return denoiser_cost(family, transformer, batch, torch.bfloat16, groups_of(plan))


def configured_step(config: RunConfig, backend: Backend) -> Step:
    """Return the cost of one step of a run's explorer: its model and size, one chunk of seeds."""
    family = family_for(config.explored_model)
    transformer = meta_denoiser(family, torch.bfloat16)
    explore = config.explore
    return step_of(family, transformer, backend, explore.chunk_size, explore.modules_to_not_convert)
