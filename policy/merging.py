"""Adapters added into the weights they stand beside: W + (alpha / rank) B A."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from policy.frozen import FrozenLinear, plain_weight
from policy.lora import adapted_modules, matrices, require_adapter, use
from policy.sharding import own_rows, sharded

if TYPE_CHECKING:  # as in policy.lora
    from peft.tuners.lora import LoraLayer


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Within the context float32 products are of float32, where TF32 is allowed otherwise."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@torch.no_grad()
def delta_weight(layer: LoraLayer, name: str) -> Tensor:
    """(alpha / rank) B A of one adapted module: float32 [out, in], for a 1x1 convolution too."""
    down, up = matrices(layer, name)
    with exact_products():
        return (up.flatten(1) @ down.flatten(1)) * layer.scaling[name]


def _base(layer: LoraLayer) -> nn.Module:
    base = layer.get_base_layer()
    assert isinstance(base, nn.Module)
    return base


@torch.no_grad()
def merged_weight(layer: LoraLayer, name: str | None) -> Tensor:
    """The merged weight of one adapted module, float32 in the shape of W; None gives W."""
    weight = plain_weight(_base(layer)).float()
    return weight.clone() if name is None else weight + delta_weight(layer, name).view_as(weight)


def merged_weights(transformer: nn.Module, name: str | None) -> Iterator[tuple[str, Tensor]]:
    """(module path, ``merged_weight``) of each adapted module."""
    modules = adapted_modules(transformer)
    if name is not None:
        require_adapter(modules, name)
    for module, layer in modules:
        yield module, merged_weight(layer, name)


@contextlib.contextmanager
def merged(transformer: nn.Module, name: str | None) -> Iterator[None]:
    """Within the context the transformer's weights are the merged ones, rounded once to their own
    dtype, and adapters are off; None: the base model, as with ``use``.

    For passes without gradients. W itself is set aside, never written, so that afterwards the base
    is what it was, bit for bit; meanwhile the merged weights of adapted modules are held beside it.
    Of sharded weights each process merges its own rows, and passes then gather merged weights: all
    processes must merge the same adapter. Raises KeyError for an adapter that does not exist,
    ValueError for packed weights.
    """
    modules = adapted_modules(transformer)
    if name is not None:
        require_adapter(modules, name)
        if any(isinstance(_base(layer), FrozenLinear) for _, layer in modules):
            raise ValueError("adapters cannot be merged into weights that lora.base packs")
    # one by one, so that an error in the middle puts back exactly what was merged
    aside: list[Callable[[], object]] = []
    try:
        for _, layer in modules if name is not None else ():
            aside.append(_merge(layer, str(name)))
        with use(transformer, None):
            yield
    finally:
        for put_back in aside:
            put_back()


@torch.no_grad()
def _merge(layer: LoraLayer, name: str) -> Callable[[], object]:
    """Merge into one module's weight; what is returned puts W back."""
    weight = _base(layer).get_parameter("weight")
    shard = sharded(weight)
    if shard is None:
        base = weight.data
        # another tensor, so that W comes back by a pointer: subtracting again would round
        weight.data = merged_weight(layer, name).to(weight.dtype)
        return lambda: setattr(weight, "data", base)
    # into the memory that is gathered from; rows of the whole product, as a product of fewer rows
    # may have other bits
    here, own = shard.to_local(), own_rows(shard, delta_weight(layer, name))
    base = here.clone()
    here.copy_(base.float() + own.view_as(base))
    return lambda: here.copy_(base)
