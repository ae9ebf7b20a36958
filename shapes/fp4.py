"""Weights rounded to NVFP4 for a training step: so that the model stays good when its explorers run it in four bits.

The rounding is the format's own (blocks of 16 along the input, scales in E4M3, one FP32 factor per matrix), without the search
for better scales. Gradients are taken at the rounded weights and applied to the wide ones (straight through).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

BLOCK = 16


def round_to_fp4(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` [N, K], K % 16 == 0, as it reads after NVFP4."""
    amax = weight.abs().max().clamp_min(1e-20)
    blocks = weight.reshape(weight.shape[0], -1, BLOCK)
    encode = 448.0 * 6.0 / amax
    scale = (blocks.abs().amax(-1, keepdim=True) * encode / 6.0).clamp_max(448.0).to(torch.float8_e4m3fn).float() / encode
    value = torch.where(scale > 0, blocks / scale.clamp_min(1e-30), torch.zeros_like(blocks)).clamp(-6, 6)
    size = value.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (torch.round(value / step) * step * scale).reshape_as(weight)


def quantisable(transformer: nn.Module) -> list[nn.Linear]:
    """The linear layers of the blocks: attention and feed-forward, not the adaptive norms."""
    found = []
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and "transformer_blocks" in name and "norm1" not in name:
            found.append(module)
    return found


@contextmanager
def rounded_weights(transformer: nn.Module, active: bool = True) -> Iterator[None]:
    """Inside, the blocks' weights are rounded; afterwards they are back, bit for bit."""
    layers = quantisable(transformer) if active else []
    wide = [layer.weight.detach().clone() for layer in layers]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(round_to_fp4(layer.weight))
    try:
        yield
    finally:
        with torch.no_grad():
            for layer, weight in zip(layers, wide, strict=True):
                layer.weight.copy_(weight)
