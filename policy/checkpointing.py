"""Gradient checkpointing of a fraction of a transformer's blocks (arXiv 1604.06174).

The activations of a checkpointed block are recomputed in the backward pass instead of stored.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from policy.families.base import Diffusers
from policy.precision.compiling import block_of
from policy.sharding import blocks_of


def checkpoint_blocks(transformer: Diffusers, share: float) -> None:
    """Recompute the fraction ``share`` (0 to 1) of the blocks, evenly spread.

    Gradients stay bit-identical. ``transformer`` is a diffusers model. A module that it passes to
    the checkpointing function but that is in none of its block lists is recomputed too.
    """
    if not share:
        return
    # the last of every 1 / share blocks is recomputed, the others are kept
    kept = {
        id(block)
        for i, block in enumerate(blocks_of(transformer))
        if int((i + 1) * share) == int(i * share)
    }

    def call(module: nn.Module, *inputs: object) -> Tensor:
        if id(block_of(module)) in kept:
            return module(*inputs)
        return checkpoint(module.__call__, *inputs, use_reentrant=False)

    transformer.enable_gradient_checkpointing(gradient_checkpointing_func=call)
