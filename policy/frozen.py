"""Frozen weights in 8 or 4 bits, adapters beside them (QLoRA, arXiv 2305.14314).

torchao packs and unpacks: "int8" is one scale per row, "nf4" NormalFloat of blocks of 64 whose
scales are packed again. A layer multiplies by its weight unpacked, in the forward and in the
backward pass anew, so that only packed weights stay; everybody who asks for the weight gets the
same numbers. Adapters cannot be merged into packed weights.
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
BLOCK, BLOCKS = 64, 256  # weights with a scale of their own, and scales with one
RULES = BACKENDS["emulated_nvfp4"]
"""Whose rules say which layers are packed: what exploring packs, too, in any format it has."""


class _Product(torch.autograd.Function):
    """y = x W^T + b [..., out] of x [..., in]; W is unpacked twice and not kept."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, layer: FrozenLinear
    ) -> Tensor:
        # not the unpacked weight, which autograd would keep until the backward pass
        ctx.layer = layer
        return F.linear(x, layer.plain(), layer.bias)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.plain(), None


class FrozenLinear(nn.Linear):
    """A linear whose weight is packed; it has no gradient."""

    def __init__(self, linear: nn.Linear, packing: FrozenFormat):
        super().__init__(linear.in_features, linear.out_features, False, "meta")
        self.packing = packing
        packed = _packed(linear.weight.detach(), packing)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    def plain(self) -> Tensor:
        """The weight [out, in] unpacked, in the type that it was packed from."""
        weight: Any = self.weight
        return weight.get_original_weight() if self.packing == "nf4" else weight.dequantize()

    def forward(self, x: Tensor) -> Tensor:
        """[..., out] of x [..., in]."""
        return _Product.apply(x, self)


def _packed(weight: Tensor, packing: FrozenFormat) -> Tensor:
    ao: Any = importlib.import_module("torchao.quantization")  # an extra
    if packing == "nf4":
        blocks = weight.numel() // BLOCK
        # scales are packed in whole groups, whose size must divide the number of blocks
        return ao.to_nf4(weight.contiguous(), BLOCK, math.gcd(blocks, BLOCKS))
    one = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    one.weight = nn.Parameter(weight, requires_grad=False)
    ao.quantize_(one, ao.Int8WeightOnlyConfig())
    return one.weight


def plain_weight(module: nn.Module) -> Tensor:
    """The weight of a module as products see it, without gradient; gathered where it is sharded."""
    if isinstance(module, FrozenLinear):
        return module.plain()
    return whole(module.get_parameter("weight").detach())


def frozen_rows(
    transformer: nn.Module, family: Family, patterns: Sequence[str] = ()
) -> list[ModuleRow]:
    """The layers that are packed: linears that exploring packs too; ``patterns`` as in
    ``explore.modules_to_not_convert``.
    """
    modules = dict(transformer.named_modules())
    plan = quantize_plan(transformer, family, patterns, RULES)
    return [row for row in plan if row.quantized and isinstance(modules[row.name], nn.Linear)]


def freeze(
    transformer: nn.Module, family: Family, packing: FrozenFormat, patterns: Sequence[str] = ()
) -> None:
    """Pack the weights of a bare transformer, in place. Raises ValueError where none can be."""
    rows = frozen_rows(transformer, family, patterns)
    if not rows:
        raise ValueError(f"lora.base = {packing!r}: no layer of the model can be packed")
    for row in rows:
        linear = transformer.get_submodule(row.name)
        assert isinstance(linear, nn.Linear)
        transformer.set_submodule(row.name, FrozenLinear(linear, packing))


def packed_bytes(rows: Sequence[ModuleRow], packing: FrozenFormat) -> int:
    """Bytes of the packed weights of these layers."""
    if packing == "int8":  # with a scale and a zero of each row
        return sum(math.prod(row.shape) + 5 * row.shape[0] for row in rows)
    weights = [math.prod(row.shape) for row in rows]
    scales = [-(-count // BLOCK) for count in weights]
    return sum(w // 2 + s + 4 * -(-s // BLOCKS) for w, s in zip(weights, scales, strict=True))


def missing() -> str | None:
    """What has to be installed; None: nothing."""
    if importlib.util.find_spec("torchao") is None:
        return "there is no module 'torchao': pip install -c constraints.txt -e '.[base]'"
    return None
