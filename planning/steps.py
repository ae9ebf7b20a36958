"""Lines of ``sol-rl plan`` with the predicted speeds by which backend ``auto`` is resolved."""

from __future__ import annotations

from configs.schema import RunConfig
from planning.counted_parts import batch_of
from planning.counting import counts_of
from planning.plan import open_architecture
from policy.precision import cost
from policy.precision.backends import BACKENDS
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
    # the speeds are relative to BF16, whatever precision the learner has
    bf16 = config.regenerate.model_copy(update={"precision": "bf16"})
    in_bf16 = config.model_copy(update={"regenerate": bf16})
    with open_architecture(config) as (family, _):
        step = counts_of(in_bf16, family, BACKENDS[COUNTED_WITH]).step
    rows = [[row[0], *row[2:]] for row in cost.table({"": step})]
    return [
        "",
        f"a step of {batch_of(config)} images, predicted speed relative to BF16, by format and by"
        " the way activations are packed; fractions of the peaks as measured on one H200",
        *(f"  {line}" for line in aligned(rows, right=True)),
    ]
