"""How many blocks training computes again in the backward pass: as few as there is memory for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from configs.schema import RunConfig
from planning.assumptions import Assumptions
from planning.layouts.choose import DoesNotFit, choose
from planning.layouts.gpus import Gpus
from planning.layouts.resolve import costs_of, to_choose, used
from policy.families import Family

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
ROOM = 0.9
"""Of a GPU's memory, where something is kept to save time: allocators leave gaps."""


def with_recomputation(
    config: RunConfig, family: Family, gpus: Sequence[Gpus], given: Assumptions | None = None
) -> RunConfig:
    """``config`` with a number in the place of ``optimizer.gradient_checkpointing = "auto"``: the
    share of recomputed blocks whose best layout on ``gpus`` is predicted to be the fastest. All
    blocks, where there is no layout to choose or no other fits.
    """
    if config.optimizer.gradient_checkpointing != "auto":
        return config
    every = _recomputing(config, 1.0)
    if not (to_choose(config) and gpus):
        return every
    mine = used(gpus, config.layout.gpus if config.layout else None)
    room, least, found = min(each.memory_gb for each in mine), math.inf, every
    for share in SHARES:
        other = _recomputing(config, share)
        try:
            best = choose(other, mine, costs_of(other, family, mine, given or Assumptions())).best
        except DoesNotFit:
            break  # with fewer recomputed less fits
        if best.seconds < least and (share == 1 or best.gb <= ROOM * room):
            found, least = other, best.seconds
    return found


def _recomputing(config: RunConfig, share: float) -> RunConfig:
    given = {0.0: False, 1.0: True}.get(share, share)
    optimizer = config.optimizer.model_copy(update={"gradient_checkpointing": given})
    return config.model_copy(update={"optimizer": optimizer})
