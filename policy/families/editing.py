"""Shared functions of editing families: the source image's latents as additional tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from policy.types import Conditioning

LATENTS = "image_latents"
"""Name of the conditioning tensor with the source image's packed latents [tokens, 4C]."""


def with_source_latents(cond: Conditioning, latents: Tensor) -> Conditioning:
    """Return a row of conditioning with the source image's latents added."""
    return Conditioning({**cond.tensors, LATENTS: latents})


def append_source_tokens(x: Tensor, cond: Conditioning) -> Tensor:
    """Append the tokens of each row's source image to the tokens [B, N, 4C]."""
    return torch.cat([x, cond.tensors[LATENTS].to(x.device, x.dtype)], dim=1)
