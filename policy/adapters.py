"""LoRA layers that compute in the dtype of the weights they stand beside.

The trained matrices A and B are float32; peft's layers compute with them in float32, for which a
bfloat16 input is written again in twice the bytes, and its result added in passes of their own.
Here float32 remains what is trained, and a narrower base computes with rounded copies.
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

    Products are in x's dtype with one rounding each; y and the gradient of x are accumulated by the
    products themselves, without a pass that adds. Gradients of A and B are float32 of a product
    rounded once. W and b have none.
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
        of_low = gradient @ narrow_up
        of_up = (gradient.t() @ low).float().mul_(ctx.scaling)
        of_down = (of_low.t() @ rows).float().mul_(ctx.scaling)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = (gradient @ weight).addmm_(of_low, narrow_down, alpha=ctx.scaling)
            of_x = of_x.view(ctx.shape)
        return of_x, None, None, of_down, of_up, None


class AdaptedLinear(Linear):
    """A linear with adapters, one of which is active."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[..., out] in the dtype of x [..., in]."""
        base: Any = self.get_base_layer()
        if self.disable_adapters or not _narrow(base):
            return super().forward(x, *args, **kwargs)
        down, up, scaling = _active(self)
        if isinstance(base, FrozenLinear):
            low = F.linear(x, down.to(x.dtype))
            return base(x) + F.linear(low, (up * scaling).to(x.dtype))
        return _AdaptedProduct.apply(x, base.weight, base.bias, down, up, scaling)


class AdaptedConv2d(Conv2d):
    """A 1x1 convolution with adapters, one of which is active."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[B, out, H, W] in the dtype of x [B, in, H, W]."""
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
"""What wraps a module of each kind."""


def _narrow(base: nn.Module) -> bool:
    """Whether it computes with fewer bits than the adapters are trained in."""
    return base.get_parameter("weight").dtype.itemsize < torch.float32.itemsize


def _active(layer: LoraLayer) -> tuple[Tensor, Tensor, float]:
    """A, B and alpha / rank of the one adapter that is active."""
    (name,) = layer.active_adapters
    down, up = matrices(layer, name)
    return down, up, layer.scaling[name]
