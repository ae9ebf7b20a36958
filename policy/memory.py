"""What a pass of the denoiser takes, before it is loaded: bytes, operations and scratch memory.

Modules are built on the meta device (``policy.meta``) and run there: what is counted are the
operations that the real modules would carry out. Not counted: memory of a device's libraries and of
the allocator's gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from policy.families.base import Family
from policy.meta import META
from policy.precision.cost import Step
from policy.precision.swap import ModuleRow, weight_modules
from policy.tally import Tally, fused_attention
from policy.types import Conditioning


@dataclass(frozen=True)
class Work(Step):
    """What one pass takes: ``peak`` are the bytes allocated at once, without the weights and
    without packed inputs of quantized layers, the largest of which has ``widest`` elements.
    """

    peak: int = 0
    widest: int = 0

    @classmethod
    def of(cls, tally: Tally) -> Work:
        """What was counted of a pass that ran on the meta device."""
        return cls(
            flops=tally.flops,
            kernels=tally.kernels,
            bytes=tally.bytes,
            small=tally.small,
            attention=tally.attention,
            heads=tally.heads,
            peak=tally.peak,
        )


# ---- bytes


def held_bytes(*modules: nn.Module) -> int:
    """Bytes of the parameters and buffers of modules."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return sum(tensor.nbytes for tensor in tensors)


def conditioning_like(
    family: Family, rows: int, dtype: torch.dtype, device: torch.device | str = META
) -> Conditioning:
    """Conditioning of ``rows`` prompts in the shapes of ``encode_prompt``, every token in use."""
    shapes = family.conditioning_shapes.items()
    return Conditioning(
        {name: torch.ones(rows, *shape, dtype=dtype, device=device) for name, shape in shapes}
    )


# ---- work


class LayerCall(NamedTuple):
    """One call of a linear or convolution: its path, operations, and elements of its input."""

    name: str
    flops: int
    elements: int


@contextmanager
def calls_of(
    transformer: nn.Module, names: Collection[str], counter: TorchDispatchMode
) -> Iterator[list[LayerCall]]:
    """The calls of the modules ``names`` in the block, which ``counter`` counts; attention is fused
    there.
    """
    calls: list[LayerCall] = []

    def noting(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            # of the output's elements by channel, so that it holds for linears and convolutions
            # alike
            weight = module.get_parameter("weight")
            flops = 2 * (output.numel() // weight.shape[0]) * weight.numel()
            calls.append(LayerCall(name, flops, inputs[0].numel()))

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
    ``groups``: of the layers that would be quantized, the one that packs the input (``groups_of``).
    """
    groups = groups or {}
    x = torch.empty(batch, *family.latent_shape, device=META)
    cond = conditioning_like(family, batch, dtype)
    tally = Tally()
    with torch.no_grad(), calls_of(transformer, groups, tally) as calls:
        family.velocity(transformer, x, torch.tensor(0.5), cond)
    packed = {groups[call.name]: call.elements for call in calls}  # a group packs its input once
    return replace(
        Work.of(tally),
        quantized=sum(call.flops for call in calls),
        inputs=len(packed),
        elements=sum(packed.values()),
        widest=max(packed.values(), default=0),
    )


def groups_of(plan: Sequence[ModuleRow]) -> dict[str, str]:
    """By quantized layer, the fused group that it is in, or itself."""
    return {row.name: row.fused or row.name for row in plan if row.quantized}


def work_of(do: Callable[[], object]) -> Work:
    """What ``do`` runs on the meta device."""
    with fused_attention(), Tally() as tally:
        do()
    return Work.of(tally)
