"""What families that edit share: the source image as latents beside those that are drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from policy.types import Conditioning

LATENTS = "image_latents"
"""The row's tensor with the source's packed latents [tokens, 4C]."""


def beside(cond: Conditioning, latents: Tensor) -> Conditioning:
    """A row with the source's latents."""
    return Conditioning({**cond.tensors, LATENTS: latents})


def followed(x: Tensor, cond: Conditioning) -> Tensor:
    """Tokens [B, N, 4C], and after them those of each row's source."""
    return torch.cat([x, cond.tensors[LATENTS].to(x.device, x.dtype)], dim=1)
