"""Gradient checkpointing of a share of a transformer's blocks (arXiv 1604.06174): their activations
are computed again in the backward pass instead of being kept.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from policy.families.base import Diffusers
from policy.precision.compiling import block_of
from policy.sharding import blocks_of


def checkpoint_blocks(transformer: Diffusers, share: float) -> None:
    """Recompute ``share`` of the blocks, 0 to 1, spread evenly; gradients are the same bit for bit.

    ``transformer`` is a diffusers model. A module that it would recompute and that is no block of
    one of its lists counts as a block that is.
    """
    if not share:
        return
    # of every 1 / share blocks the last is recomputed
    kept = {
        id(block)
        for i, block in enumerate(blocks_of(transformer))
        if int((i + 1) * share) == int(i * share)
    }

    def run(module: nn.Module, *inputs: object) -> Tensor:
        if id(block_of(module)) in kept:
            return module(*inputs)
        return checkpoint(module.__call__, *inputs, use_reentrant=False)

    transformer.enable_gradient_checkpointing(gradient_checkpointing_func=run)
