"""What families that edit share: the source image as latents beside those that are drawn."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from configs.sources import Pixels
from policy.types import Conditioning

LATENTS = "image_latents"
"""The row's tensor with the source's packed latents [tokens, 4C]."""


def as_image(pixels: Pixels) -> Image.Image:
    """uint8 [3, H, W] as pipelines take it."""
    return Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))


def beside(cond: Conditioning, latents: Tensor) -> Conditioning:
    """A row with the source's latents."""
    return Conditioning({**cond.tensors, LATENTS: latents})


def followed(x: Tensor, cond: Conditioning) -> Tensor:
    """Tokens [B, N, 4C], and after them those of each row's source."""
    return torch.cat([x, cond.tensors[LATENTS].to(x.device, x.dtype)], dim=1)
