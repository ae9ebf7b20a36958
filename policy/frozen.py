"""Frozen base weights in 8 or 4 bits under LoRA adapters (QLoRA, arXiv 2305.14314).

torchao packs and unpacks. "int8" has one scale per row; "nf4" is NormalFloat in blocks of 64 whose
scales are quantized again. A layer unpacks its weight for each product, once in the forward and
again in the backward pass, so that only packed weights stay in memory. All readers of the weight
get the same numbers. Adapters cannot be merged into packed weights.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policy.families.base import Family
from policy.precision.backends import BACKENDS
from policy.precision.swap import ModuleRow, quantize_plan
from policy.sharding import whole

FrozenFormat = Literal["int8", "nf4"]
BLOCK, BLOCKS = 64, 256  # weights per scale, and scales per second-level scale


class _Product(torch.autograd.Function):
    """y = x W^T + b [..., out] for x [..., in]; W is unpacked in both passes and not kept."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, layer: FrozenLinear
    ) -> Tensor:
        # saves the layer, as autograd would keep the unpacked weight until the backward pass
        ctx.layer = layer
        return F.linear(x, layer.dequantized(), layer.bias)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.dequantized(), None


class FrozenLinear(nn.Linear):
    """A linear layer whose weight is packed and has no gradient."""

    def __init__(self, linear: nn.Linear, packing: FrozenFormat):
        super().__init__(linear.in_features, linear.out_features, False, "meta")
        self.packing = packing
        packed = _packed(linear.weight.detach(), packing)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    def dequantized(self) -> Tensor:
        """Return the unpacked weight [out, in] in the dtype that it was packed from."""
        weight: Any = self.weight
        return weight.get_original_weight() if self.packing == "nf4" else weight.dequantize()

    def forward(self, x: Tensor) -> Tensor:
        """Return y [..., out] for x [..., in]."""
        return _Product.apply(x, self)


def _packed(weight: Tensor, packing: FrozenFormat) -> Tensor:
    ao: Any = importlib.import_module("torchao.quantization")  # an extra
    if packing == "nf4":
        blocks = weight.numel() // BLOCK
        # scales are packed in whole groups, whose size must divide the number of blocks
        return ao.to_nf4(weight.contiguous(), BLOCK, math.gcd(blocks, BLOCKS))
    linear = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    ao.quantize_(linear, ao.Int8WeightOnlyConfig())
    return linear.weight


def plain_weight(module: nn.Module) -> Tensor:
    """Return the weight of a module, unpacked and without gradient; gather it if it is sharded."""
    if isinstance(module, FrozenLinear):
        return module.dequantized()
    return whole(module.get_parameter("weight").detach())


def frozen_rows(
    transformer: nn.Module, family: Family, patterns: Sequence[str] = ()
) -> list[ModuleRow]:
    """Return the layers to pack: the linears that every quantizing backend would quantize.

    Rollout actors load all other layers from the model's own files, so they would not explore with
    the packed weights of a layer that they do not quantize. ``patterns`` are as in
    ``explore.modules_to_not_convert``. Raises ValueError if no layer can be packed.
    """
    modules = dict(transformer.named_modules())
    plans = [
        quantize_plan(transformer, family, patterns, backend)
        for backend in BACKENDS.values()
        if backend.quantizes
    ]
    found = [
        rows[0]
        for rows in zip(*plans, strict=True)
        if all(row.quantized for row in rows) and isinstance(modules[rows[0].name], nn.Linear)
    ]
    if not found:
        raise ValueError("lora.base: no layer of the model can be packed: use 'full'")
    return found


def freeze(
    transformer: nn.Module, family: Family, packing: FrozenFormat, patterns: Sequence[str] = ()
) -> None:
    """Pack the weights of a transformer without adapters, in place.

    Raises ValueError if no layer can be packed.
    """
    for row in frozen_rows(transformer, family, patterns):
        linear = transformer.get_submodule(row.name)
        assert isinstance(linear, nn.Linear)
        transformer.set_submodule(row.name, FrozenLinear(linear, packing))


def packed_bytes(rows: Sequence[ModuleRow], packing: FrozenFormat) -> int:
    """Return the size in bytes of the packed weights of these layers."""
    if packing == "int8":  # and a scale and a zero point per row
        return sum(math.prod(row.shape) + 5 * row.shape[0] for row in rows)
    weights = [math.prod(row.shape) for row in rows]
    scales = [-(-count // BLOCK) for count in weights]
    return sum(w // 2 + s + 4 * -(-s // BLOCKS) for w, s in zip(weights, scales, strict=True))


def missing() -> str | None:
    """Return what has to be installed, or None if torchao is installed."""
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed: pip install -c constraints.txt -e '.[base]'"
    return None
