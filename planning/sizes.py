"""Bytes of a model's parts that are held, gathered or sent, computed without loading weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from policy import frozen
from policy.families.base import Family
from policy.lora import adapted_modules
from policy.meta import meta_denoiser
from policy.pass_cost import conditioning_like, held_bytes
from policy.precision.backends import Backend
from policy.precision.fused import FusedMember
from policy.precision.layer import QuantizedLinear
from policy.precision.swap import ModuleRow, changing_modules
from policy.sharding import blocks_of


def packed_base(
    family: Family, packing: frozen.FrozenFormat, patterns: tuple[str, ...], dtype: torch.dtype
) -> tuple[int, int]:
    """Return (bytes saved by packing the frozen weights, bytes of the largest one unpacked)."""
    key = (family.model.path, patterns)
    if key not in _rows:
        base = meta_denoiser(family, dtype)
        _rows[key] = frozen.frozen_rows(base, family, patterns)
    rows = _rows[key]
    sizes = [math.prod(row.shape) * dtype.itemsize for row in rows]
    return sum(sizes) - frozen.packed_bytes(rows, packing), max(sizes, default=0)


class Shards(NamedTuple):
    """Bytes of a denoiser whose weights are sharded by ``policy.sharding``."""

    largest: int  # the largest block; each block is gathered as a whole
    always: int  # weights outside all blocks, which stay gathered for a whole pass


def shards_of(family: Family, dtype: torch.dtype) -> Shards:
    """Return the sizes that a pass through the sharded denoiser gathers."""
    key = (family.model.path, dtype)
    if key not in _shards:
        transformer = meta_denoiser(family, dtype)
        blocks = [held_bytes(block) for block in blocks_of(transformer)]
        _shards[key] = Shards(max(blocks, default=0), held_bytes(transformer) - sum(blocks))
    return _shards[key]


_shards: dict[tuple[str, torch.dtype], Shards] = {}
"""Cache of ``shards_of``, by model path and dtype."""
_rows: dict[tuple[str, tuple[str, ...]], list[ModuleRow]] = {}
"""Cache of ``packed_base``, by model path and patterns: building a large model takes seconds."""


def adapted_bytes(transformer: nn.Module) -> int:
    """Return the bytes of the weights that have adapters: merging holds these a second time."""
    weights = (
        layer.get_base_layer().get_parameter("weight") for _, layer in adapted_modules(transformer)
    )
    return sum(weight.nbytes for weight in weights)


class WireBytes(NamedTuple):
    """Bytes that are sent to a new rollout actor, and bytes that are sent after each update."""

    total: int
    changing: int


def wire_bytes(
    plan: Sequence[ModuleRow],
    layers: Mapping[str, QuantizedLinear | FusedMember],
    adapted: Sequence[str],
    backend: Backend,
) -> WireBytes:
    """Return the bytes of packed layers and of merged unquantized weights (``learner.publish``)."""
    packed = {
        name: sum(tensor.nbytes for tensor in layer.wire_targets().values())
        for name, layer in layers.items()
    }
    whole = {row.name: math.prod(row.shape) for row in plan if not row.quantized}
    merged = sum(whole.get(name, 0) for name in adapted) * backend.wire_dtype.itemsize
    changing = changing_modules(plan, adapted)
    sent_again = sum(packed.get(name, 0) for name in changing)
    return WireBytes(sum(packed.values()) + merged, sent_again + merged)


def conditioning_bytes(family: Family, dtype: torch.dtype, guided: bool) -> int:
    """Return the bytes of one prompt's conditioning, with the negative prompt's if ``guided``."""
    row = conditioning_like(family, 1, dtype).tensors.values()
    return (1 + guided) * sum(tensor.nbytes for tensor in row)
