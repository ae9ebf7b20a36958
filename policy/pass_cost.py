"""The cost of a denoiser pass, counted without its weights: bytes, operations and scratch memory.

Modules are built on the meta device (``policy.meta``) and run there, and the operations that the
real modules would execute are counted. The memory of a device's libraries and fragmentation of the
allocator are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from policy.counted_once import LayerCall, equal_blocks_once
from policy.families.base import Family
from policy.meta import META
from policy.precision.cost import Step
from policy.precision.swap import ModuleRow, weight_modules
from policy.tally import Tally, fused_attention
from policy.types import Conditioning


@dataclass(frozen=True)
class PassCost(Step):
    """The cost of one pass with its scratch memory.

    ``peak`` is the largest number of bytes allocated at the same time, without the weights and
    without packed inputs of quantized layers. ``widest`` is the number of elements of the largest
    such input.
    """

    peak: int = 0
    widest: int = 0

    @classmethod
    def of(cls, tally: Tally) -> PassCost:
        """Return the cost of a pass that ran on the meta device under ``tally``."""
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
    """Return the size in bytes of all parameters and buffers of the modules."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return sum(tensor.nbytes for tensor in tensors)


def conditioning_like(
    family: Family, rows: int, dtype: torch.dtype, device: torch.device | str = META
) -> Conditioning:
    """Return conditioning of ``rows`` prompts, shaped as by ``encode_prompt``, all tokens used."""
    shapes = family.conditioning_shapes.items()
    return Conditioning(
        {name: torch.ones(rows, *shape, dtype=dtype, device=device) for name, shape in shapes}
    )


# ---- work


@contextmanager
def calls_of(
    transformer: nn.Module, names: Collection[str], counter: TorchDispatchMode
) -> Iterator[list[LayerCall]]:
    """Record the calls of the modules ``names`` within the context.

    Yields the list that the calls are appended to. ``counter`` is active within the context, and
    attention counts as a fused kernel.
    """
    calls: list[LayerCall] = []

    def hook_for(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            # output elements per channel times weight elements: valid for linears and convolutions
            weight = module.get_parameter("weight")
            flops = 2 * (output.numel() // weight.shape[0]) * weight.numel()
            calls.append(LayerCall(name, flops, inputs[0].numel()))

        return record

    hooks = [
        module.register_forward_hook(hook_for(name))
        for name, module in weight_modules(transformer)
        if name in names
    ]
    try:
        with fused_attention(), counter:
            yield calls
    finally:
        for hook in hooks:
            hook.remove()


def denoiser_cost(
    family: Family,
    transformer: nn.Module,
    batch: int,
    dtype: torch.dtype,
    groups: Mapping[str, str] | None = None,
) -> PassCost:
    """Return the cost of one call of a denoiser on the meta device, without gradients.

    ``transformer`` is unquantized; ``batch`` is the number of images. ``groups`` maps each layer
    that would be quantized to the layer that packs its input (``groups_of``).
    """
    groups = groups or {}
    x = torch.empty(batch, *family.latent_shape, device=META)
    cond = conditioning_like(family, batch, dtype)
    tally = Tally()
    with (
        torch.no_grad(),
        calls_of(transformer, groups, tally) as calls,
        equal_blocks_once(transformer, list(groups), calls, tally),
    ):
        family.velocity(transformer, x, torch.tensor(0.5), cond)
    packed = {groups[call.name]: call.elements for call in calls}  # a group packs its input once
    return replace(
        PassCost.of(tally),
        quantized=sum(call.flops for call in calls),
        inputs=len(packed),
        elements=sum(packed.values()),
        widest=max(packed.values(), default=0),
    )


def groups_of(plan: Sequence[ModuleRow]) -> dict[str, str]:
    """Map each quantized layer to the first layer of its fused group, or to itself."""
    return {row.name: row.fused or row.name for row in plan if row.quantized}


def count_cost(do: Callable[[], object]) -> PassCost:
    """Return the cost of what ``do`` runs on the meta device."""
    with fused_attention(), Tally() as tally:
        do()
    return PassCost.of(tally)
