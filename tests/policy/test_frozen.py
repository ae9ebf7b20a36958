"""Frozen base weights in 8 and 4 bits: how they are packed, what layers compute with them, and
which settings are refused.
"""

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
from policy.precision.backends import BACKENDS
from policy.precision.swap import quantize_plan, weight_modules
from tests.tiny_families import tiny_model

# torchao is not imported here, because it would import torch's compiler in every process that
# collects tests
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


def quantize_int8(weight: torch.Tensor) -> torch.Tensor:
    """Quantize each row with its own scale max |w| / 127.5. Codes are rounded half to even and
    limited to -128 to 127.
    """
    scale = weight.abs().amax(1, keepdim=True) / 127.5
    return (weight / scale).round().clamp(-128, 127) * scale


def test_int8_packing_uses_one_scale_per_row():
    module = linear()
    weight = module.weight.detach().clone()
    plain = FrozenLinear(module, "int8").dequantized()
    # the largest value of a row is 127.5 codes, which may be rounded in either direction
    inside = weight.abs() < weight.abs().amax(1, keepdim=True)
    assert torch.allclose(plain[inside], quantize_int8(weight)[inside], rtol=0, atol=1e-6)
    # half a code of each row, plus a margin for the ends of the range
    assert ((plain - weight).abs() <= 0.51 * weight.abs().amax(1, keepdim=True) / 127).all()


def test_nf4_packing_uses_sixteen_levels_per_block():
    module = linear()
    blocks = FrozenLinear(module, "nf4").dequantized().reshape(-1, 64)
    assert max(len(block.unique()) for block in blocks) <= 16
    weight = module.weight.detach().reshape(-1, 64)
    # the largest gap between levels is 0.304 of the largest value of a block; scales are within 1 %
    assert ((blocks - weight).abs() <= 0.16 * weight.abs().amax(1, keepdim=True)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_layer_equals_linear_with_unpacked_weight(packing: Any, dtype: torch.dtype):
    module = FrozenLinear(linear().to(dtype), packing)
    assert module.weight.dtype == dtype
    x = torch.randn(2, 5, 128, dtype=dtype)
    x_packed, x_plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = module(x_packed)
    expected = nn.functional.linear(x_plain, module.dequantized(), module.bias)
    assert torch.equal(y, expected)
    weights = torch.randn(expected.shape).to(dtype)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    assert x_packed.grad is not None and x_plain.grad is not None
    assert torch.equal(x_packed.grad, x_plain.grad)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapter_gradients_match_those_of_an_unpacked_base(family, packing, dtype):
    """The gradients are compared with those of the same model whose plain weights are the unpacked
    ones.
    """
    packed = family.load_transformer("cpu", dtype)
    freeze(packed, family, packing)
    plain = family.load_transformer("cpu", dtype)
    with torch.no_grad():
        for row in frozen_rows(plain, family):
            unpacked = plain_weight(packed.get_submodule(row.name))
            plain.get_submodule(row.name).get_parameter("weight").copy_(unpacked)
    cond = pass_cost.conditioning_like(family, 2, dtype, "cpu")
    x = torch.randn(2, *family.latent_shape)
    gradients = []
    for model in (packed, plain):
        add_adapters(model, LORA, family, seed=1)
        for name, parameter in trainable(model):
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(3))
        family.velocity(model, x, torch.full((2,), 0.5), cond).square().mean().backward()
        gradients.append({name: p.grad for name, p in trainable(model)})
    # the same products, but roundings in another order
    bound = 1e-5 if dtype == torch.float32 else 0.05
    for name, gradient in gradients[0].items():
        expected = gradients[1][name]
        if expected is None or not expected.abs().max():
            continue
        assert (gradient - expected).norm() <= bound * expected.norm(), name


@pytest.mark.parametrize("name", [name for name, each in BACKENDS.items() if each.quantizes])
def test_every_packed_layer_is_published_whatever_explores(tiny_z_image_dir, name):
    """NVFP4's kernels do not take the tiny Z-Image's layers of 48 columns, which FP8's take."""
    family = family_for(tiny_model("z_image", tiny_z_image_dir))
    transformer = family.load_transformer("cpu", torch.float32)
    frozen = {row.name for row in frozen_rows(transformer, family)}
    plan = quantize_plan(transformer, family, (), BACKENDS[name])
    assert frozen and frozen <= {row.name for row in plan if row.quantized}
    assert "layers.0.attention.to_k" not in frozen


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_bytes_match_the_plan(family, packing):
    transformer = family.load_transformer("cpu", torch.bfloat16)
    rows, before = frozen_rows(transformer, family), held_bytes(transformer)
    freeze(transformer, family, packing)
    layers = [module for _, module in weight_modules(transformer)]
    packed = [module for module in layers if isinstance(module, FrozenLinear)]
    assert len(packed) == len(rows) > 4
    actual_bytes = sum(tensor_bytes(module.weight) for module in packed)
    planned_bytes = packed_bytes(rows, packing)
    # nf4 also stores 16 levels and a mean for every tensor, and its scales fill whole blocks
    assert (
        planned_bytes
        <= actual_bytes
        <= planned_bytes + (0 if packing == "int8" else 600 * len(rows))
    )
    saved, widest = sizes.packed_base(family, packing, (), torch.bfloat16)
    assert (
        saved == 2 * sum(math.prod(row.shape) for row in rows) - planned_bytes
        and before > saved > 0
    )
    assert widest == 2 * max(math.prod(row.shape) for row in rows)


def tensor_bytes(weight: Any) -> int:
    names, _ = weight.__tensor_flatten__()
    parts = [getattr(weight, name) for name in names]
    return sum(part.numel() * part.element_size() for part in parts)


def test_merged_weights_use_the_unpacked_base_and_do_not_replace_it(family):
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
def test_incompatible_settings_are_refused_in_one_line(overrides: list[str], message: str):
    with pytest.raises(ConfigError) as refused:
        load("quickstart", ["lora.base=int8", *overrides])
    (line,) = refused.value.lines
    assert line.startswith(message)
