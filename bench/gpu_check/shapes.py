"""Quantized layers of the published models on fake CUDA tensors, which need no GPU.

For every packing and every quantized product, torch checks shapes, dtypes and alignment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bench.architectures import case_of
from bench.gpu_check.findings import Finding, Item
from bench.gpu_check.setting import Setting
from configs.section import Tree
from policy.families.architectures import published_names
from policy.pass_cost import conditioning_like
from policy.precision.backends import BACKENDS, Backend
from policy.precision.layer import PointwiseConvolution
from policy.precision.swap import quantize_plan, weight_modules
from records.errors import first_line

FEW: dict[str, Tree] = {
    "flux": {"num_layers": 1, "num_single_layers": 1},
    "sd3": {"num_layers": 2, "dual_attention_layers": [0], "pos_embed_max_size": 64},
    "sana": {"num_layers": 1},
    "qwen_image": {"num_layers": 1},
    "z_image": {"n_layers": 1, "n_refiner_layers": 1},
    "flux2": {"num_layers": 1, "num_single_layers": 1},
    "flux2_klein": {"num_layers": 1, "num_single_layers": 1},
    "wan": {"num_layers": 1},
    "sana_video": {"num_layers": 1},
}
"""Configuration changes that leave one block of each kind, at real width.

SD3.5 Large actually has no dual attention; here its shapes are those of Medium's.
"""
BATCH = 8
FORMATS = ("fp8", "torch_nvfp4")


class Calls(TorchDispatchMode):
    """Recorder of packing operators and products within a block.

    ``packed`` has the input shapes of the packing operators, ``products`` the devices of the
    operands of products, and ``copies`` the copies of rows, of which there should be none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.packed: list[tuple[int, ...]] = []
        self.products: list[set[str]] = []
        self.copies: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operator and run it."""
        name = func._schema.name
        if name in ("sol_rl::fp8_rows", "sol_rl::nvfp4_tiles"):
            if not args[0].is_contiguous():  # the operator would copy it first
                self.copies.append(name)
            self.packed.append(tuple(args[0].shape))
        elif name.startswith("aten::_scaled_mm"):
            operands = (*args, *(kwargs or {}).values())
            self.products.append({t.device.type for t in operands if isinstance(t, torch.Tensor)})
        elif name in ("aten::clone", "aten::copy_") and args[0].ndim == 2:
            self.copies.append(f"{name} of rows {list(args[0].shape)}")
        return func(*args, **(kwargs or {}))


LayerInput = tuple[tuple[int, ...], tuple[int, ...], int, bool]
"""(shape, strides, N, whether there is a bias) of a quantized layer's input."""


def inputs_of(name: str) -> set[LayerInput]:
    """Return the inputs of a published model's quantized layers, for 8 images of 1024 x 1024."""
    seen: set[LayerInput] = set()

    def record(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        bias = module.bias is not None
        seen.add((tuple(inputs[0].shape), inputs[0].stride(), len(module.weight), bias))

    with torch.no_grad(), case_of(name, 1024, False) as case:
        transformer = case.build("meta", torch.bfloat16, **FEW[case.family.name])
        plan = quantize_plan(transformer, case.family, (), BACKENDS["torch_nvfp4"])
        quantized = {row.name for row in plan if row.quantized}
        for path, module in weight_modules(transformer):
            if path in quantized:
                module.register_forward_pre_hook(record)
        x = torch.empty(BATCH, *case.family.latent_shape, device="meta")
        cond = conditioning_like(case.family, BATCH, torch.bfloat16)
        case.family.velocity(transformer, x, torch.tensor(0.5), cond)
    return seen


@torch.no_grad()
def fault(backend: Backend, seen: LayerInput) -> str | None:
    """Return what is wrong with a layer of this backend on such an input, or None.

    The input must be packed once, as contiguous rows, and multiplied once, all on the GPU.
    """
    shape, strides, n, bias = seen
    image = len(shape) == 4
    k = shape[1] if image else shape[-1]
    # torch 2.14 does not check the sizes of NVFP4 products without data, as 2.13 does
    if refused := backend.unsupported_reason(n, k):
        return refused
    with FakeTensorMode():
        linear = nn.Linear(k, n, bias=False, device="meta")
        empty = torch.empty(n, k, dtype=torch.bfloat16, device="cuda:0")
        linear.weight = nn.Parameter(empty, False)
        if bias:
            offset = torch.empty(n, dtype=torch.bfloat16, device="cuda:0")
            linear.bias = nn.Parameter(offset, False)
        quantized: Any = backend.replacements("power_of_two")(linear)
        layer = PointwiseConvolution(quantized) if image else quantized
        x = torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="cuda:0")
        try:
            with Calls() as calls:
                y = layer(x)
        except RuntimeError as error:
            return first_line(error)
    if calls.copies:
        return calls.copies[0]
    if y.device.type != "cuda" or y.dtype != torch.bfloat16:
        return f"a result of {y.dtype} on {y.device}"
    if y.shape != ((shape[0], n, *shape[2:]) if image else (*shape[:-1], n)):
        return f"a result of {list(y.shape)}"
    if calls.packed != [(math.prod(shape) // k, k)]:
        return f"packed {calls.packed}"
    return None if calls.products == [{"cuda"}] else f"products on {calls.products}"


def measure(setting: Setting) -> Iterator[Item]:
    """Check every layer of every published model, equally with and without a GPU."""
    for name in published_names():
        seen = inputs_of(name)
        for form in FORMATS:
            faults = [why for layer in sorted(seen) if (why := fault(BACKENDS[form], layer))]
            yield Finding(
                f"{name} {form}, layers that torch refuses or that copy",
                len(faults),
                "layers",
                {"architecture": name, "backend": form},
                {"inputs": len(seen)},
                "; ".join(faults[:2]),
            )
