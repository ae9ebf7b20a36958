"""Every packing and every quantised product of the published models, on tensors without data on a
CUDA device: shapes, types and alignment as torch checks them, with no GPU.
"""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bench.explorer import case_of
from policy.families.architectures import build, published_names
from policy.memory import conditioning_like
from policy.precision.backends import BACKENDS
from policy.precision.layer import PointwiseConvolution
from policy.precision.swap import quantise_plan, weight_modules

FEW = {
    "flux": {"num_layers": 1, "num_single_layers": 1},
    "sd3": {"num_layers": 2, "dual_attention_layers": [0]},
    "sana": {"num_layers": 1},
    "qwen_image": {"num_layers": 1},
    "z_image": {"n_layers": 1, "n_refiner_layers": 1},
    "flux2": {"num_layers": 1, "num_single_layers": 1},
    "flux2_klein": {"num_layers": 1, "num_single_layers": 1},
}
"""One block of each kind, of the real width; SD3.5 Large has no dual attention in fact, but the
shapes are those of Medium's.
"""
BATCH = 8


class Calls(TorchDispatchMode):
    """Shapes that the packing operators and the products were called with."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: list[tuple[int, ...]] = []
        self.products: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("sol_rl::fp8_rows", "sol_rl::nvfp4_tiles"):
            assert args[0].is_contiguous()  # what is not would be copied first
            self.packed.append(tuple(args[0].shape))
        elif name.startswith("aten::_scaled_mm"):
            given = (*args, *(kwargs or {}).values())
            assert all(t.device.type == "cuda" for t in given if isinstance(t, torch.Tensor))
            self.products.append(True)
        elif name in ("aten::clone", "aten::copy_") and args[0].ndim == 2:
            raise AssertionError(f"{name} of rows {list(args[0].shape)}")
        return func(*args, **(kwargs or {}))


Seen = tuple[tuple[int, ...], tuple[int, ...], int, bool]


def inputs_of(name: str) -> set[Seen]:
    """(shape, strides, N, whether there is a bias) of what a quantised layer of the model gets."""
    seen: set[Seen] = set()

    def look(module: Any, given: tuple[torch.Tensor, ...]) -> None:
        bias = module.bias is not None
        seen.add((tuple(given[0].shape), given[0].stride(), len(module.weight), bias))

    with case_of(name, 1024, False) as case:
        part = {**case.part, "config": {**case.part["config"], **FEW[case.family.name]}}
        transformer = build(part, "meta", torch.bfloat16)
        plan = quantise_plan(transformer, case.family, (), BACKENDS["torch_nvfp4"])
        quantised = {row.name for row in plan if row.quantised}
        for path, module in weight_modules(transformer):
            if path in quantised:
                module.register_forward_pre_hook(look)
        x = torch.empty(BATCH, *case.family.latent_shape, device="meta")
        cond = conditioning_like(case.family, BATCH, torch.bfloat16)
        case.family.velocity(transformer, x, torch.tensor(0.5), cond)
    return seen


@pytest.mark.parametrize("name", published_names())
@torch.no_grad()
def test_a_step_at_the_size_of_a_published_model(name):
    """Each input packed once and multiplied once. SANA's pixels lie together, so that its 1x1
    convolutions copy nothing before that.
    """
    seen = inputs_of(name)
    assert len(seen) >= 4
    for backend in ("fp8", "torch_nvfp4"):
        replacement = BACKENDS[backend].replacements("power_of_two")
        for shape, strides, n, bias in seen:
            image = len(shape) == 4
            k = shape[1] if image else shape[-1]
            with FakeTensorMode():
                linear = nn.Linear(k, n, bias=False, device="meta")
                linear.weight = nn.Parameter(
                    torch.empty(n, k, dtype=torch.bfloat16, device="cuda:0"), False
                )
                if bias:
                    offset = torch.empty(n, dtype=torch.bfloat16, device="cuda:0")
                    linear.bias = nn.Parameter(offset, False)
                layer: nn.Module = replacement(linear)
                layer = PointwiseConvolution(layer) if image else layer
                x = torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="cuda:0")
                with Calls() as calls:
                    y = layer(x)
            assert y.device.type == "cuda" and y.dtype == torch.bfloat16
            assert y.shape == ((shape[0], n, *shape[2:]) if image else (*shape[:-1], n))
            assert calls.packed == [(math.prod(shape) // k, k)] and len(calls.products) == 1
