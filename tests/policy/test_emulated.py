"""Emulated NVFP4 linear layers: their results, which modules they replace, and their speed."""

import time

import pytest
import torch
from torch import nn

from policy.precision import nvfp4
from policy.precision.backends import BACKENDS
from policy.precision.emulated import EmulatedNVFP4Linear, Workspace
from policy.precision.nvfp4 import quantize, quantize_activation
from policy.precision.swap import quantize_plan, swap_linears, weight_modules


def emulated_layer(linear: nn.Linear, workspace: Workspace | None = None) -> EmulatedNVFP4Linear:
    layer = EmulatedNVFP4Linear(linear, workspace or Workspace())
    for name, tensor in BACKENDS["emulated_nvfp4"].pack(linear.weight, True).items():
        getattr(layer, name).copy_(tensor)
    return layer


@pytest.fixture
def linear() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(64, 24)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(7, 64), (2, 5, 64), (64,)])
def test_forward_is_alpha_times_the_product_of_operands(linear, shape):
    """The result is compared with float64. Products of E2M1 and E4M3 values are exact in float32.
    The K = 64 additions, the multiplication by alpha and the addition of the bias are rounded, each
    by at most 2^-24 of the sum of absolute products.
    """
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3
    packed = quantize(linear.weight, search=True)
    ux, amax = quantize_activation(x)
    uw = nvfp4.decoded_operand(
        packed.codes, packed.scales, nvfp4.nibble_values(), nvfp4.scale_values()
    )
    alpha = amax.double() * packed.amax.double() / (36 * 448 * 448)
    expected = alpha * (ux.double() @ uw.double().t()) + linear.bias.double()
    bound = (
        (64 + 4)
        * 2.0**-24
        * (alpha * (ux.double().abs() @ uw.double().abs().t()) + linear.bias.double().abs())
    )
    y = emulated_layer(linear)(x)
    assert y.shape == (*shape[:-1], 24) and y.dtype == torch.float32
    assert ((y.double() - expected).abs() <= bound).all()


@torch.no_grad()
def test_quantization_error_is_that_of_the_format(linear):
    """With Gaussian activations and nearly uniform weights, the relative error is about 0.13. It is
    not zero, which shows that the layer quantizes.
    """
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    unquantized = linear(x) - linear.bias
    error = (
        (emulated_layer(linear)(x) - linear.bias - unquantized).norm() / unquantized.norm()
    ).item()
    assert 0.08 < error < 0.16


@torch.no_grad()
def test_bfloat16_input_gives_bfloat16_output(linear):
    layer = emulated_layer(linear)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, layer(x.float()).bfloat16())
    assert layer.bfloat16().amax.dtype == torch.float32  # a cast does not reach the packed weight
    assert torch.equal(emulated_layer(linear).amax, layer.amax)


@torch.no_grad()
def test_equal_input_is_quantized_once(linear):
    workspace = Workspace()
    layers = [emulated_layer(linear, workspace) for _ in range(2)]
    x = torch.randn(4, 64)
    first = layers[0](x)
    operand = workspace.quantized(x)
    assert workspace.quantized(x) is operand
    assert torch.equal(layers[1](x), first)
    x += 1  # changed in place: the same object with another value
    assert workspace.quantized(x) is not operand
    assert torch.equal(layers[0](x), emulated_layer(linear)(x))
    other = torch.randn(3, 64)
    assert torch.equal(layers[0](other), emulated_layer(linear)(other))
    with torch.inference_mode():  # tensors without a version counter
        inner = x * 2
        assert torch.equal(layers[0](inner), emulated_layer(linear)(inner))
        inner += 1
        assert torch.equal(layers[0](inner), emulated_layer(linear)(inner))


@torch.no_grad()
def test_non_contiguous_input_gives_the_same_result(linear):
    x = torch.randn(64, 6).t()
    assert torch.equal(emulated_layer(linear)(x), emulated_layer(linear)(x.contiguous()))


def test_plan_quantizes_the_matrix_products_of_the_blocks(family, transformer):
    plan = {
        row.name: row for row in quantize_plan(transformer, family, (), BACKENDS["emulated_nvfp4"])
    }
    quantized = {name for name, row in plan.items() if row.quantized}
    attention = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")
    expected = {f"transformer_blocks.{i}.attn.{part}" for i in range(2) for part in attention}
    expected |= {
        f"transformer_blocks.{i}.ff.net.{part}" for i in range(2) for part in ("0.proj", "2")
    }
    expected |= {
        f"transformer_blocks.0.{part}"
        for part in ("attn.to_add_out", "ff_context.net.0.proj", "ff_context.net.2")
    }
    assert quantized == expected
    assert plan["proj_out"].why == "left unquantized by the model family: proj_out"
    assert plan["transformer_blocks.0.norm1.linear"].shape == (192, 32)
    assert {name for name, _ in weight_modules(transformer)} == set(plan)


def test_plan_excludes_patterns_and_unsupported_shapes(family, transformer):
    transformer.transformer_blocks[0].ff.net[2] = nn.Linear(120, 32)
    plan = {
        r.name: r
        for r in quantize_plan(
            transformer, family, ["transformer_blocks.1.*"], BACKENDS["emulated_nvfp4"]
        )
    }
    assert (
        plan["transformer_blocks.1.attn.to_q"].why
        == "left unquantized by explore.modules_to_not_convert: transformer_blocks.1.*"
    )
    assert plan["transformer_blocks.0.ff.net.2"].why == "K = 120 is not a multiple of 16"
    assert not any(
        row.quantized for name, row in plan.items() if name.startswith("transformer_blocks.1.")
    )
    with pytest.raises(
        ValueError, match=r"explore.modules_to_not_convert: 'blocks\.\*' matches no module"
    ):
        quantize_plan(transformer, family, ["blocks.*"])


def test_plan_ignores_adapters(family, adapted):
    without_adapters = family.load_transformer("cpu", torch.float32)
    for backend in BACKENDS.values():
        assert quantize_plan(adapted, family, (), backend) == quantize_plan(
            without_adapters, family, (), backend
        )
    with pytest.raises(ValueError, match="quantize it before it is wrapped"):
        swap_linears(adapted, quantize_plan(adapted, family), BACKENDS["emulated_nvfp4"])


def test_unquantized_backends_replace_no_layers(family, transformer):
    plan = quantize_plan(transformer, family, (), BACKENDS["bf16"])
    assert not any(row.quantized for row in plan)
    assert {r.why for r in plan if "attn" in r.name} == {"backend bf16 quantizes nothing"}
    assert swap_linears(transformer, plan, BACKENDS["bf16"]) == {}


@pytest.mark.slow
def test_emulation_takes_at_most_twice_the_time_of_fp32(family):
    """The eager path is measured on one thread, on a transformer as wide as the shipped one. The
    best of ten rounds counts, so that other processes on the machine influence the result less.
    """
    from diffusers import SD3Transformer2DModel

    size = {
        "sample_size": 16,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "pos_embed_max_size": 16,
    }
    width = {
        "attention_head_dim": 48,
        "num_attention_heads": 4,
        "caption_projection_dim": 192,
        "joint_attention_dim": 128,
    }
    unquantized = SD3Transformer2DModel(
        **size, **width, pooled_projection_dim=128, qk_norm="rms_norm"
    ).eval()
    emulated = SD3Transformer2DModel.from_config(unquantized.config).eval()
    backend = BACKENDS["emulated_nvfp4"]
    swapped = swap_linears(emulated, quantize_plan(emulated, family, (), backend), backend)
    for name, layer in swapped.items():
        for part, tensor in backend.pack(unquantized.get_submodule(name).weight, False).items():
            getattr(layer, part).copy_(tensor)
    inputs = {
        "hidden_states": torch.randn(24, 4, 16, 16),
        "timestep": torch.full((24,), 500.0),
        "encoder_hidden_states": torch.randn(24, 32, 128),
        "pooled_projections": torch.randn(24, 128),
    }

    @torch.no_grad()
    def seconds(module: nn.Module) -> float:
        start = time.perf_counter()
        module(**inputs)
        return time.perf_counter() - start

    rounds = [(seconds(emulated), seconds(unquantized)) for _ in range(12)][2:]
    assert min(e for e, _ in rounds) <= 2 * min(w for _, w in rounds)
