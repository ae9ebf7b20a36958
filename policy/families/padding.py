"""Prompts of different lengths in one tensor: rows are padded at the end, a mask says how far."""

from __future__ import annotations

import torch
from torch import Tensor

from policy.types import Conditioning

EMBEDS, MASK = "prompt_embeds", "prompt_embeds_mask"


def padded(embeds: Tensor, tokens: int) -> Conditioning:
    """One prompt's embeddings [L, D], L at most ``tokens``, as a row of conditioning.

    ``prompt_embeds`` [1, tokens, D], zeros after L, and ``prompt_embeds_mask`` [1, tokens] of ones
    and zeros in the same dtype.
    """
    row = embeds.new_zeros(1, tokens, embeds.shape[-1])
    row[0, : len(embeds)] = embeds
    mask = embeds.new_zeros(1, tokens)
    mask[0, : len(embeds)] = 1
    return Conditioning({EMBEDS: row, MASK: mask})


def shapes(tokens: int, width: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a row of ``padded``."""
    return {EMBEDS: (tokens, width), MASK: (tokens,)}


def lengths(cond: Conditioning) -> list[int]:
    """Tokens in use of every row of ``padded``; all of them where there is no data to look at."""
    mask = cond.tensors[MASK]
    if mask.is_meta:
        return [mask.shape[1]] * len(mask)
    return (mask > 0).sum(1).tolist()


def trimmed(
    cond: Conditioning, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Embeddings [B, L, D] up to the longest row, and a mask bool [B, L], None where all is in use.

    A pipeline pads no prompt that is alone, and a mask that hides nothing costs the fast kernels of
    attention.
    """
    used = lengths(cond)
    longest = max(used)
    embeds = cond.tensors[EMBEDS][:, :longest].to(device, dtype)
    if min(used) == longest:
        return embeds, None
    return embeds, cond.tensors[MASK][:, :longest].to(device) > 0
