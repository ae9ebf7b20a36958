"""Padding of prompts of different lengths to one tensor with a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from policy.types import Conditioning

EMBEDS, MASK = "prompt_embeds", "prompt_embeds_mask"


def padded(embeds: Tensor, tokens: int) -> Conditioning:
    """Pad one prompt's embeddings [L, D], L at most ``tokens``, to a row of conditioning.

    The row has ``prompt_embeds`` [1, tokens, D], zero after L, and ``prompt_embeds_mask``
    [1, tokens] of ones and zeros in the same dtype.
    """
    row = embeds.new_zeros(1, tokens, embeds.shape[-1])
    row[0, : len(embeds)] = embeds
    mask = embeds.new_zeros(1, tokens)
    mask[0, : len(embeds)] = 1
    return Conditioning({EMBEDS: row, MASK: mask})


def shapes(tokens: int, width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of ``padded``, without the batch dimension."""
    return {EMBEDS: (tokens, width), MASK: (tokens,)}


def lengths(cond: Conditioning) -> list[int]:
    """Return the number of used tokens of every row; on the meta device, the padded number."""
    mask = cond.tensors[MASK]
    if mask.is_meta:
        return [mask.shape[1]] * len(mask)
    return (mask > 0).sum(1).tolist()


def trimmed(
    cond: Conditioning, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Trim padding that no row uses; return (embeddings [B, L, D], mask bool [B, L] or None).

    L is the length of the longest row. The mask is None if all rows have this length: stock
    pipelines do not pad a single prompt, and any mask, even of ones, disables fast attention
    kernels.
    """
    used = lengths(cond)
    longest = max(used)
    embeds = cond.tensors[EMBEDS][:, :longest].to(device, dtype)
    if min(used) == longest:
        return embeds, None
    return embeds, cond.tensors[MASK][:, :longest].to(device) > 0
