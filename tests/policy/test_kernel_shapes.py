"""Every packing and every quantised product of the published models, on tensors without data on a
CUDA device: shapes, types and alignment as torch checks them, with no GPU.
"""

import math
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bench.explorer import case_of
from policy.families.architectures import build, published_names
from policy.precision.backends import BACKENDS
from policy.precision.swap import quantise_plan, swap_linears

FEW = {
    "flux": {"num_layers": 1, "num_single_layers": 1},
    "sd3": {"num_layers": 2, "dual_attention_layers": [0]},
    "sana": {"num_layers": 1},
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


@pytest.mark.parametrize("name", published_names())
@pytest.mark.parametrize("backend", ["fp8", "torch_nvfp4"])
@torch.no_grad()
def test_a_step_at_the_size_of_a_published_model(name, backend):
    """Each input of a group is packed once; SANA's pixels lie together, so that no 1x1 convolution
    copies them.
    """
    with case_of(name, 1024, False) as case, FakeTensorMode():
        family = case.family
        part = {**case.part, "config": {**case.part["config"], **FEW[family.name]}}
        transformer = build(part, "cuda:0", torch.bfloat16)
        plan = quantise_plan(transformer, family, (), BACKENDS[backend])
        layers = swap_linears(transformer, plan, BACKENDS[backend])
        transformer.to("cuda:0")
        x, sigma, cond = case.inputs(BATCH, "cuda:0")
        with Calls() as calls:
            velocity = family.velocity(transformer, x, sigma, cond)
    assert velocity.shape == (BATCH, *family.latent_shape)
    groups = {row.fused or row.name for row in plan if row.quantised}
    assert len(calls.products) == len(groups) and len(layers) >= len(groups)
    assert len(calls.packed) <= len(calls.products)
    assert {shape[1] for shape in calls.packed} == {
        math.prod(row.shape[1:]) for row in plan if row.quantised
    }
    largest = max(rows for rows, _ in calls.packed)
    assert largest % 128 == 0 and largest >= BATCH * 1024
