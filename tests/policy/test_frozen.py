"""Frozen weights in 8 and 4 bits: what is packed, what is computed with it, and what is refused."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import nn

from configs.load import ConfigError, load
from configs.training import Lora
from planning import sizes
from policy import pass_cost
from policy.families import family_for
from policy.frozen import FrozenLinear, freeze, frozen_rows, packed_bytes, plain_weight
from policy.lora import add_adapters, trainable, use_adapter
from policy.merging import merged, merged_weight
from policy.pass_cost import held_bytes
from policy.precision.swap import weight_modules
from tests.tiny_families import tiny_model

# not imported here: it imports torch's compiler, in every process that collects tests
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="torchao is not installed: pip install '.[base]'",
)
PACKINGS = ("int8", "nf4")
LORA = Lora(rank=4, alpha=8)


@pytest.fixture
def family(tiny_sd3_dir):
    return family_for(tiny_model("sd3", tiny_sd3_dir))


def linear(rows: int = 96, columns: int = 128, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(columns, rows).requires_grad_(False)


def int8_by_hand(weight: torch.Tensor) -> torch.Tensor:
    """A scale for each row, max |w| / 127.5, codes rounded half to even and kept in -128 to 127."""
    scale = weight.abs().amax(1, keepdim=True) / 127.5
    return (weight / scale).round().clamp(-128, 127) * scale


def test_int8_is_a_scale_for_each_row():
    module = linear()
    weight = module.weight.detach().clone()
    plain = FrozenLinear(module, "int8").dequantized()
    # the largest of a row is 127.5 codes, which may round either way
    inside = weight.abs() < weight.abs().amax(1, keepdim=True)
    assert torch.allclose(plain[inside], int8_by_hand(weight)[inside], rtol=0, atol=1e-6)
    # half a code of each row, and a little for the ends of the range
    assert ((plain - weight).abs() <= 0.51 * weight.abs().amax(1, keepdim=True) / 127).all()


def test_nf4_has_sixteen_levels_of_each_block():
    module = linear()
    blocks = FrozenLinear(module, "nf4").dequantized().reshape(-1, 64)
    assert max(len(block.unique()) for block in blocks) <= 16
    weight = module.weight.detach().reshape(-1, 64)
    # the widest gap between levels is 0.304 of a block's largest; scales are within 1 %
    assert ((blocks - weight).abs() <= 0.16 * weight.abs().amax(1, keepdim=True)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_layer_computes_as_a_linear_of_its_unpacked_weight(packing: Any, dtype: torch.dtype):
    module = FrozenLinear(linear().to(dtype), packing)
    assert module.weight.dtype == dtype
    x = torch.randn(2, 5, 128, dtype=dtype)
    mine, twin = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = module(mine)
    expected = nn.functional.linear(twin, module.dequantized(), module.bias)
    assert torch.equal(y, expected)
    weights = torch.randn(expected.shape).to(dtype)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    assert mine.grad is not None and twin.grad is not None
    assert torch.equal(mine.grad, twin.grad)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_adapters_are_those_of_a_base_with_these_weights(family, packing, dtype):
    """Against the same model whose plain weights are the unpacked ones."""
    packed = family.load_transformer("cpu", dtype)
    freeze(packed, family, packing)
    plain = family.load_transformer("cpu", dtype)
    with torch.no_grad():
        for row in frozen_rows(plain, family):
            unpacked = plain_weight(packed.get_submodule(row.name))
            plain.get_submodule(row.name).get_parameter("weight").copy_(unpacked)
    cond = pass_cost.conditioning_like(family, 2, dtype, "cpu")
    x = torch.randn(2, *family.latent_shape)
    found = []
    for model in (packed, plain):
        add_adapters(model, LORA, family, seed=1)
        for name, parameter in trainable(model):
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(3))
        family.velocity(model, x, torch.full((2,), 0.5), cond).square().mean().backward()
        found.append({name: p.grad for name, p in trainable(model)})
    # the same products in another order of roundings
    bound = 1e-5 if dtype == torch.float32 else 0.05
    for name, gradient in found[0].items():
        expected = found[1][name]
        if expected is None or not expected.abs().max():
            continue
        assert (gradient - expected).norm() <= bound * expected.norm(), name


@pytest.mark.parametrize("packing", PACKINGS)
def test_bytes_are_those_that_the_plan_counts(family, packing):
    transformer = family.load_transformer("cpu", torch.bfloat16)
    rows, before = frozen_rows(transformer, family), held_bytes(transformer)
    freeze(transformer, family, packing)
    layers = [module for _, module in weight_modules(transformer)]
    packed = [module for module in layers if isinstance(module, FrozenLinear)]
    assert len(packed) == len(rows) > 4
    held = sum(tensors_in(module.weight) for module in packed)
    recorded = packed_bytes(rows, packing)
    # nf4: 16 levels and a mean with every tensor, and whole blocks of scales
    assert recorded <= held <= recorded + (0 if packing == "int8" else 600 * len(rows))
    saved, widest = sizes.packed_base(family, packing, (), torch.bfloat16)
    assert saved == 2 * sum(math.prod(row.shape) for row in rows) - recorded and before > saved > 0
    assert widest == 2 * max(math.prod(row.shape) for row in rows)


def tensors_in(weight: Any) -> int:
    names, _ = weight.__tensor_flatten__()
    parts = [getattr(weight, name) for name in names]
    return sum(part.numel() * part.element_size() for part in parts)


def test_merged_weights_of_a_packed_base_are_published_only(family):
    transformer = family.load_transformer("cpu", torch.float32)
    freeze(transformer, family, "int8")
    add_adapters(transformer, LORA, family, seed=1)
    name, layer = next(iter(adapted(transformer)))
    base: Any = layer.get_base_layer()
    assert torch.equal(merged_weight(layer, "current"), base.dequantized())  # B is zero
    with pytest.raises(ValueError, match="cannot be merged"), merged(transformer, "current"):
        pass
    with use_adapter(transformer, None):
        pass


def adapted(transformer: nn.Module) -> Any:
    from policy.lora import adapted_modules

    return [pair for pair in adapted_modules(transformer) if pair[0]]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["explore.backend=fp32"], "lora.base: 'int8' with exploring in fp32"),
        (["arm=naive_scaling"], "lora.base: 'int8' with exploring in fp32"),
        (
            ["audit.action=finer_backend", "audit.min_sign_agreement=0.5"],
            "lora.base: 'int8' with audit.action",
        ),
        (["regenerate.compile=true"], "lora.base: 'int8' with regenerate.compile"),
        (["optimizer.compile=true"], "lora.base: 'int8' with optimizer.compile"),
    ],
)
def test_incompatible_settings_of_a_packed_base_are_one_line(overrides: list[str], message: str):
    with pytest.raises(ConfigError) as refused:
        load("quickstart", ["lora.base=int8", *overrides])
    (line,) = refused.value.lines
    assert line.startswith(message)
