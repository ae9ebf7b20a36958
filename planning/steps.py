"""Lines of ``sol-rl plan`` with the predicted speeds by which backend ``auto`` is resolved."""

from __future__ import annotations

import torch

from configs.schema import RunConfig
from planning.counting import batch_of
from planning.plan import open_architecture
from policy.meta import meta_denoiser
from policy.precision import cost
from policy.precision.backends import BACKENDS
from policy.precision.counting import step_of
from records.tables import aligned

COUNTED_WITH = "torch_nvfp4"
"""Backend whose layers are counted; those of ``fp8`` are the same except for odd shapes."""


def step_lines(config: RunConfig) -> list[str]:
    """Return lines with the predicted speed of a rollout actor's step against BF16, per known GPU.

    The step has the run's own model, image size and chunk size. The result is empty for a run
    without GPUs or without exploring.
    """
    if config.plan.explore is None or not (config.services.rollout.gpus or config.layout):
        return []
    with open_architecture(config) as (family, _):
        step = step_of(
            family,
            meta_denoiser(family, torch.bfloat16),
            BACKENDS[COUNTED_WITH],
            batch_of(config),
            config.explore.modules_to_not_convert,
        )
    rows = [[row[0], *row[2:]] for row in cost.table({"": step})]
    return [
        "",
        f"a step of {batch_of(config)} images, predicted speed relative to BF16, by format and by"
        " the way activations are packed; fractions of the peaks as measured on one H200",
        *(f"  {line}" for line in aligned(rows, right=True)),
    ]
