"""Choose the share of blocks that training recomputes in the backward pass (checkpointing)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from configs.schema import RunConfig
from planning.assumptions import Assumptions
from planning.layouts.choose import DoesNotFit, choose
from planning.layouts.gpus import Gpus
from planning.layouts.resolve import costs_of, limit_gpus, needs_layout
from policy.families import Family

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
ROOM = 0.9
"""Share of GPU memory that may be used if fewer blocks are recomputed: allocators leave gaps."""


def with_recomputation(
    config: RunConfig, family: Family, gpus: Sequence[Gpus], given: Assumptions | None = None
) -> RunConfig:
    """Return ``config`` with ``optimizer.gradient_checkpointing = "auto"`` resolved.

    It becomes the share of recomputed blocks whose best layout on ``gpus`` is predicted to be the
    fastest, or all blocks if there is no layout to choose or no smaller share fits.
    """
    if config.optimizer.gradient_checkpointing != "auto":
        return config
    default = _recomputing(config, 1.0)
    if not (needs_layout(config) and gpus):
        return default
    usable = limit_gpus(gpus, config.layout.gpus if config.layout else None)
    memory_gb, least_s, fastest = min(each.memory_gb for each in usable), math.inf, default
    for share in SHARES:
        candidate = _recomputing(config, share)
        try:
            best = choose(
                candidate, usable, costs_of(candidate, family, usable, given or Assumptions())
            ).best
        except DoesNotFit:
            break  # smaller shares need even more memory
        if best.seconds < least_s and (share == 1 or best.gb <= ROOM * memory_gb):
            fastest, least_s = candidate, best.seconds
    return fastest


def _recomputing(config: RunConfig, share: float) -> RunConfig:
    setting = {0.0: False, 1.0: True}.get(share, share)
    optimizer = config.optimizer.model_copy(update={"gradient_checkpointing": setting})
    return config.model_copy(update={"optimizer": optimizer})
