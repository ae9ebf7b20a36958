"""What a model will need, before it is loaded: bytes, operations and scratch memory.

Modules are built on the meta device (``policy.meta``) and run there: what is counted are the
operations that the real modules would carry out. Not counted: memory of a device's libraries and of
the allocator's gaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from policy import frozen
from policy.checkpointing import checkpoint_blocks
from policy.families.base import Diffusers, Family
from policy.lora import adapted_modules, use
from policy.meta import META, blank
from policy.precision.backends import Backend
from policy.precision.cost import Step
from policy.precision.fused import FusedMember
from policy.precision.layer import QuantisedLinear
from policy.precision.swap import ModuleRow, changing_modules, weight_modules
from policy.sharding import blocks_of
from policy.tally import Tally, fused_attention
from policy.types import Conditioning


@dataclass(frozen=True)
class Work(Step):
    """What one pass takes: ``peak`` are the bytes allocated at once, without the weights and
    without packed inputs of quantised layers, the largest of which has ``widest`` elements.
    """

    peak: int = 0
    widest: int = 0


# ---- bytes


def packed_base(
    family: Family, packing: frozen.Packing, patterns: tuple[str, ...], dtype: torch.dtype
) -> tuple[int, int]:
    """(bytes that packing the learner's frozen weights saves, bytes of the largest unpacked)."""
    key = (family.model.path, patterns)
    if key not in _rows:
        base = blank(family, "transformer", dtype)
        _rows[key] = frozen.frozen_rows(base, family, patterns)
    rows = _rows[key]
    sizes = [math.prod(row.shape) * dtype.itemsize for row in rows]
    return sum(sizes) - frozen.packed_bytes(rows, packing), max(sizes, default=0)


class Shards(NamedTuple):
    """Bytes of a denoiser whose weights are sharded by ``policy.sharding``."""

    largest: int  # of the weights that are gathered as one, the largest
    always: int  # what no block has, which stays gathered for a whole pass


def shards_of(family: Family, dtype: torch.dtype) -> Shards:
    """What a pass through the sharded denoiser gathers."""
    key = (family.model.path, dtype)
    if key not in _shards:
        transformer = blank(family, "transformer", dtype)
        blocks = [held_bytes(block) for block in blocks_of(transformer)]
        _shards[key] = Shards(max(blocks, default=0), held_bytes(transformer) - sum(blocks))
    return _shards[key]


_shards: dict[tuple[str, torch.dtype], Shards] = {}
"""What ``shards_of`` found, by model and type."""
_rows: dict[tuple[str, tuple[str, ...]], list[ModuleRow]] = {}
"""What ``packed_base`` found, by model and patterns: building a large model takes seconds."""


def held_bytes(*modules: nn.Module) -> int:
    """Bytes of the parameters and buffers of modules."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return sum(tensor.nbytes for tensor in tensors)


def adapted_bytes(transformer: nn.Module) -> int:
    """Bytes of the weights that adapters stand beside: what merging holds a second time."""
    weights = (
        layer.get_base_layer().get_parameter("weight") for _, layer in adapted_modules(transformer)
    )
    return sum(weight.nbytes for weight in weights)


class WireBytes(NamedTuple):
    """Bytes that a new rollout actor is sent, and bytes that are sent after each update."""

    total: int
    changing: int


def wire_bytes(
    plan: Sequence[ModuleRow],
    layers: Mapping[str, QuantisedLinear | FusedMember],
    adapted: Sequence[str],
    backend: Backend,
) -> WireBytes:
    """Bytes of packed layers, and of merged weights of unquantized ones (``learner.publish``)."""
    packed = {
        name: sum(tensor.nbytes for tensor in layer.wire_targets().values())
        for name, layer in layers.items()
    }
    whole = {row.name: math.prod(row.shape) for row in plan if not row.quantised}
    merged = sum(whole.get(name, 0) for name in adapted) * backend.wire_dtype.itemsize
    changing = changing_modules(plan, adapted)
    sent_again = sum(packed.get(name, 0) for name in changing)
    return WireBytes(sum(packed.values()) + merged, sent_again + merged)


def conditioning_like(
    family: Family, rows: int, dtype: torch.dtype, device: torch.device | str = META
) -> Conditioning:
    """Conditioning of ``rows`` prompts in the shapes of ``encode_prompt``, every token in use."""
    shapes = family.conditioning_shapes.items()
    return Conditioning(
        {name: torch.ones(rows, *shape, dtype=dtype, device=device) for name, shape in shapes}
    )


def conditioning_bytes(family: Family, dtype: torch.dtype, guided: bool) -> int:
    """Bytes of one prompt's row, with the negative prompt beside it where there is guidance."""
    row = conditioning_like(family, 1, dtype).tensors.values()
    return (1 + guided) * sum(tensor.nbytes for tensor in row)


# ---- work


class Call(NamedTuple):
    """One call of a linear or convolution: its path, operations, and elements of its input."""

    name: str
    flops: int
    elements: int


@contextmanager
def calls_of(
    transformer: nn.Module, names: Collection[str], counter: TorchDispatchMode
) -> Iterator[list[Call]]:
    """The calls of the modules ``names`` in the block, which ``counter`` counts; attention is fused
    there.
    """
    calls: list[Call] = []

    def noting(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            weight = module.get_parameter("weight")
            flops = 2 * (output.numel() // weight.shape[0]) * weight.numel()
            calls.append(Call(name, flops, inputs[0].numel()))

        return note

    hooks = [
        module.register_forward_hook(noting(name))
        for name, module in weight_modules(transformer)
        if name in names
    ]
    try:
        with fused_attention(), counter:
            yield calls
    finally:
        for hook in hooks:
            hook.remove()


def sampling_work(
    family: Family,
    transformer: nn.Module,
    batch: int,
    dtype: torch.dtype,
    groups: Mapping[str, str] | None = None,
) -> Work:
    """One call of an unquantized denoiser on the meta device for ``batch`` images, no gradients.
    ``groups``: of the layers that would be quantised, the one that packs the input (``groups_of``).
    """
    groups = groups or {}
    x = torch.empty(batch, *family.latent_shape, device=META)
    cond = conditioning_like(family, batch, dtype)
    tally = Tally()
    with torch.no_grad(), calls_of(transformer, groups, tally) as calls:
        family.velocity(transformer, x, torch.tensor(0.5), cond)
    packed = {groups[call.name]: call.elements for call in calls}  # a group packs its input once
    return replace(
        _work(tally),
        quantised=sum(call.flops for call in calls),
        inputs=len(packed),
        elements=sum(packed.values()),
        widest=max(packed.values(), default=0),
    )


def groups_of(plan: Sequence[ModuleRow]) -> dict[str, str]:
    """By quantised layer, the fused group that it is in, or itself."""
    return {row.name: row.fused or row.name for row in plan if row.quantised}


def work_of(do: Callable[[], object]) -> Work:
    """What ``do`` runs on the meta device."""
    with fused_attention(), Tally() as tally:
        do()
    return _work(tally)


def _work(tally: Tally) -> Work:
    return Work(
        flops=tally.flops,
        kernels=tally.kernels,
        bytes=tally.bytes,
        small=tally.small,
        attention=tally.attention,
        heads=tally.heads,
        peak=tally.peak,
    )


def training_work(
    family: Family, transformer: nn.Module, batch: int, dtype: torch.dtype, recomputed: float
) -> Work:
    """Forward and backward pass of ``batch`` points, a share of the blocks ``recomputed``; the peak
    has the adapter's gradients in it.
    """
    model: Diffusers = transformer
    checkpoint_blocks(model, recomputed)
    x = torch.empty(batch, *family.latent_shape, device=META)
    cond = conditioning_like(family, batch, dtype)
    try:
        with fused_attention(), Tally() as tally, use(transformer, "current"):
            velocity = family.velocity(transformer, x, torch.full((batch,), 0.5, device=META), cond)
            loss = (velocity - x).square().mean()
            del velocity
            loss.backward()
    finally:
        transformer.zero_grad(set_to_none=True)
        if recomputed:
            model.disable_gradient_checkpointing()
    return _work(tally)


def decoding_work(
    family: Family, batch: int, decoder: nn.Module | None = None, gpu: bool = False
) -> tuple[int, Work]:
    """(bytes of the decoder, work of decoding ``batch`` latents as configured). ``decoder`` is one
    on the meta device; None: the model's own autoencoder in FP32. ``gpu``: it runs on one.

    Clips are decoded one at a time, as ``Family.decode`` does it.
    """
    vae: Diffusers = blank(family, "vae", torch.float32) if decoder is None else decoder
    if family.model.vae_slicing:
        vae.enable_slicing()
    if family.model.vae_tiling:
        vae.enable_tiling()
    together = 1 if family.video else batch
    latents = torch.empty(together, *family.latent_shape, device=META, dtype=vae.dtype)
    with torch.no_grad(), fused_attention(), Tally(converts=gpu) as tally:
        family.pixels(vae, latents).float().clamp(0, 1)
    return held_bytes(vae), replace(_work(tally), flops=tally.flops * (batch // together))


def source_work(family: Family, dtype: torch.dtype, gpu: bool = False) -> Work:
    """The encoder's autoencoder on the image that a prompt edits, in ``dtype``."""
    vae: Diffusers = blank(family, "vae", dtype)
    image = torch.empty(1, *family.source_shape, device=META, dtype=dtype)
    with torch.no_grad(), fused_attention(), Tally(converts=gpu) as tally:
        vae.encode(image, return_dict=False)
    return _work(tally)
