"""What one call of a model's denoiser does, counted on tensors without data: see ``cost.Step``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs.schema import RunConfig
from policy.families import family_for
from policy.families.base import Family
from policy.memory import calls_of, conditioning_like
from policy.meta import META, blank
from policy.precision.base import Backend
from policy.precision.cost import Step
from policy.precision.swap import quantise_plan
from policy.tally import flop_counts


class _Traffic(TorchDispatchMode):
    """Multiplications, kernels, and the bytes of all operations but matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self._counts = flop_counts()
        self.flops = self.kernels = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        multiplied = self._counts.get(func._overloadpacket)
        schema = func._schema
        view = not schema.is_mutable and any(value.alias_info for value in schema.returns)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if multiplied is not None:
            self.flops += multiplied(*args, **(kwargs or {}), out_val=out)
            self.kernels += 1
        elif made and not view and not schema.name.startswith(("aten::empty", "aten::new_empty")):
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.bytes += sum(tensor.nbytes for tensor in given + made)
            self.kernels += 1
        return out


def step_of(
    family: Family,
    transformer: nn.Module,
    backend: Backend,
    batch: int,
    modules_to_not_convert: Sequence[str] = (),
) -> Step:
    """One call for ``batch`` images at the family's size, all text tokens in use. ``transformer``
    is unquantised, in bfloat16 on the meta device.
    """
    plan = quantise_plan(transformer, family, modules_to_not_convert, backend)
    groups = {row.name: row.fused or row.name for row in plan if row.quantised}
    x = torch.empty(batch, *family.latent_shape, device=META)
    cond = conditioning_like(family, batch, torch.bfloat16)
    traffic = _Traffic()
    with torch.no_grad(), calls_of(transformer, groups, traffic) as calls:
        family.velocity(transformer, x, torch.tensor(0.5), cond)
    inputs = {groups[call.name]: call.elements for call in calls}  # a group packs its input once
    quantised, elements = sum(call.flops for call in calls), sum(inputs.values())
    return Step(traffic.flops, quantised, len(inputs), elements, traffic.kernels, traffic.bytes)


def configured_step(config: RunConfig, backend: Backend) -> Step:
    """A step of a run's explorer: its model and size, one chunk of seeds."""
    family = family_for(config.explored_model)
    transformer = blank(family, "transformer", torch.bfloat16)
    explore = config.explore
    return step_of(family, transformer, backend, explore.chunk_size, explore.modules_to_not_convert)
