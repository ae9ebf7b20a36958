"""Training steps with weights and activations rounded to NVFP4.

They make the model produce the same images when it is quantized to four bits. The rounding is that
of the format (blocks of 16 along the input, scales in E4M3, one FP32 factor per tensor), without a
search for better scales. Gradients are computed at the rounded values and applied to the
unquantized ones (straight-through estimator).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

BLOCK = 16


def round_to_fp4(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight`` [N, K], K % 16 == 0, quantized to NVFP4 and dequantized."""
    amax = weight.abs().max().clamp_min(1e-20)
    blocks = weight.reshape(weight.shape[0], -1, BLOCK)
    encode = 448.0 * 6.0 / amax
    scale = (blocks.abs().amax(-1, keepdim=True) * encode / 6.0).clamp_max(448.0).to(
        torch.float8_e4m3fn
    ).float() / encode
    value = torch.where(scale > 0, blocks / scale.clamp_min(1e-30), torch.zeros_like(blocks)).clamp(
        -6, 6
    )
    size = value.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (torch.round(value / step) * step * scale).reshape_as(weight)


def quantizable(transformer: nn.Module) -> list[nn.Linear]:
    """Return the linear layers of the blocks that are quantized.

    These are attention and feed-forward layers, not those of the adaptive norms.
    """
    layers = []
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and "blocks." in name and "norm1" not in name:
            layers.append(module)
    return layers


class RoundedInputs:
    """Forward pre-hook that rounds the inputs of linear layers to NVFP4.

    Layers that share an input (to_q, to_k, to_v) round it once.
    """

    def __init__(self) -> None:
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, _: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        if self._last is None or self._last[0] is not inputs[0]:
            x = inputs[0]
            with torch.no_grad():
                error = round_to_fp4(x.reshape(-1, x.shape[-1])).reshape_as(x) - x
            self._last = (x, x + error)
        return (self._last[1],)


@contextmanager
def in_four_bits(transformer: nn.Module) -> Iterator[None]:
    """Round the weights and inputs of the transformer's blocks inside the ``with`` block.

    Afterwards the weights are restored bit for bit.
    """
    layers = quantizable(transformer)
    originals = [layer.weight.detach().clone() for layer in layers]
    inputs = RoundedInputs()
    hooks = [layer.register_forward_pre_hook(inputs) for layer in layers]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(round_to_fp4(layer.weight))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for layer, weight in zip(layers, originals, strict=True):
                layer.weight.copy_(weight)
