"""Merging of LoRA adapters into the base weights: W + (alpha / rank) B A."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from policy.frozen import FrozenLinear, plain_weight
from policy.lora import adapted_modules, matrices, require_adapter, use_adapter
from policy.sharding import own_rows, sharded

if TYPE_CHECKING:  # as in policy.lora
    from peft.tuners.lora import LoraLayer


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Compute float32 products in full float32 within the context, even if TF32 is allowed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@torch.no_grad()
def delta_weight(layer: LoraLayer, name: str) -> Tensor:
    """Return (alpha / rank) B A of one adapted module, float32 [out, in].

    The shape is the same for a 1x1 convolution.
    """
    down, up = matrices(layer, name)
    with exact_products():
        return (up.flatten(1) @ down.flatten(1)) * layer.scaling[name]


def _base(layer: LoraLayer) -> nn.Module:
    base = layer.get_base_layer()
    assert isinstance(base, nn.Module)
    return base


@torch.no_grad()
def merged_weight(layer: LoraLayer, name: str | None) -> Tensor:
    """Return the merged weight of one adapted module, float32 in the shape of W.

    ``name`` None returns the base weight W.
    """
    weight = plain_weight(_base(layer)).float()
    return weight.clone() if name is None else weight + delta_weight(layer, name).view_as(weight)


def merged_weights(transformer: nn.Module, name: str | None) -> Iterator[tuple[str, Tensor]]:
    """Yield (module path, ``merged_weight``) of each adapted module."""
    modules = adapted_modules(transformer)
    if name is not None:
        require_adapter(modules, name)
    for module, layer in modules:
        yield module, merged_weight(layer, name)


@contextlib.contextmanager
def merged(transformer: nn.Module, name: str | None) -> Iterator[None]:
    """Merge the adapter ``name`` into the weights within the context; None gives the base model.

    The merged weights are rounded once to the base dtype, and adapters are disabled. For passes
    without gradients. The base weights are kept and restored afterwards, bit for bit; meanwhile
    the merged weights of adapted modules need memory in addition. Each process merges its own rows
    of sharded weights, and passes then gather the merged weights, so all processes must merge the
    same adapter. Raises KeyError if the adapter does not exist, and ValueError for packed weights.
    """
    modules = adapted_modules(transformer)
    if name is not None:
        require_adapter(modules, name)
        if any(isinstance(_base(layer), FrozenLinear) for _, layer in modules):
            raise ValueError("adapters cannot be merged into weights that are packed by lora.base")
    # one undo function per module: an error halfway restores exactly the modules merged so far
    undo: list[Callable[[], object]] = []
    try:
        for _, layer in modules if name is not None else ():
            undo.append(_merge(layer, str(name)))
        with use_adapter(transformer, None):
            yield
    finally:
        for restore in undo:
            restore()


@torch.no_grad()
def _merge(layer: LoraLayer, name: str) -> Callable[[], object]:
    """Merge an adapter into one module's weight; return a function that restores W."""
    weight = _base(layer).get_parameter("weight")
    shard = sharded(weight)
    if shard is None:
        base = weight.data
        # a new tensor, so that restoring W assigns a pointer: subtracting the update would round
        weight.data = merged_weight(layer, name).to(weight.dtype)
        return lambda: setattr(weight, "data", base)
    # in place, because passes gather from this memory. The rows are taken from the full product, as
    # a product of fewer rows may differ in its bits
    local, delta = shard.to_local(), own_rows(shard, delta_weight(layer, name))
    base = local.clone()
    local.copy_(base.float() + delta.view_as(base))
    return lambda: local.copy_(base)
