"""LoRA layers that compute in the dtype of the base weights.

The trained matrices A and B are float32. peft's layers also compute with them in float32: a
bfloat16 input is copied to twice the bytes, and the result is added in separate passes. These
layers train float32 matrices as well, but if the base weight is narrower, they compute with copies
of A and B that are rounded to its dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Conv2d, Linear, LoraLayer
from torch import Tensor, nn

from policy.frozen import FrozenLinear
from policy.lora import matrices


class _AdaptedProduct(torch.autograd.Function):
    """y = x W^T + b + s (x A^T) B^T for x [..., in], W [out, in], A [r, in], B [out, r].

    Matrix products compute in x's dtype and round once each. The products accumulate into y and
    into the gradient of x (``addmm_``), which saves a separate addition. The gradients of A and B
    are products rounded once and then converted to float32. W and b have no gradient.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scaling: float,
    ) -> Tensor:
        narrow_down, narrow_up = down.to(x.dtype), up.to(x.dtype)
        rows = x.flatten(0, -2)
        low = rows @ narrow_down.t()
        y = F.linear(rows, weight, bias).addmm_(low, narrow_up.t(), alpha=scaling)
        ctx.save_for_backward(rows, weight, low, narrow_down, narrow_up)
        ctx.scaling, ctx.shape = scaling, x.shape
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        rows, weight, low, narrow_down, narrow_up = ctx.saved_tensors
        gradient = gradient.reshape(-1, len(weight))
        grad_low = gradient @ narrow_up
        grad_up = (gradient.t() @ low).float().mul_(ctx.scaling)
        grad_down = (grad_low.t() @ rows).float().mul_(ctx.scaling)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (gradient @ weight).addmm_(grad_low, narrow_down, alpha=ctx.scaling)
            grad_x = grad_x.view(ctx.shape)
        return grad_x, None, None, grad_down, grad_up, None


class AdaptedLinear(Linear):
    """A linear layer with LoRA adapters, one of which is active."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return y [..., out] in the dtype of x [..., in]."""
        base: Any = self.get_base_layer()
        if self.disable_adapters or not _narrow(base):
            return super().forward(x, *args, **kwargs)
        down, up, scaling = _active(self)
        if isinstance(base, FrozenLinear):
            low = F.linear(x, down.to(x.dtype))
            return base(x) + F.linear(low, (up * scaling).to(x.dtype))
        return _AdaptedProduct.apply(x, base.weight, base.bias, down, up, scaling)


class AdaptedConv2d(Conv2d):
    """A 1x1 convolution with LoRA adapters, one of which is active."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return y [B, out, H, W] in the dtype of x [B, in, H, W]."""
        base: Any = self.get_base_layer()
        if self.disable_adapters or not _narrow(base):
            return super().forward(x, *args, **kwargs)
        down, up, scaling = _active(self)
        low = F.conv2d(x, down.to(x.dtype), stride=base.stride, padding=base.padding)
        return base(x) + F.conv2d(low, (up * scaling).to(x.dtype))


LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: AdaptedLinear,
    nn.Conv2d: AdaptedConv2d,
}
"""The class of LoRA layer that wraps each type of module."""


def _narrow(base: nn.Module) -> bool:
    """Return True if the weight of ``base`` has fewer bits than float32, the adapters' dtype."""
    return base.get_parameter("weight").dtype.itemsize < torch.float32.itemsize


def _active(layer: LoraLayer) -> tuple[Tensor, Tensor, float]:
    """Return A, B and alpha / rank of the only active adapter."""
    (name,) = layer.active_adapters
    down, up = matrices(layer, name)
    return down, up, layer.scaling[name]
