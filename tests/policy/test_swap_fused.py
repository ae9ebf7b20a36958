"""Linear layers with the same input run as one product. Only the time changes, not the results."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from learner.publish import NonFiniteWeights, Publisher
from policy.explorer import Explorer
from policy.precision.backends import BACKENDS
from policy.precision.fused import FusedMember, fuse_linears
from policy.precision.layer import swizzled
from policy.precision.nvfp4 import Packed, dequantize
from policy.precision.swap import quantize_plan, swap_linears
from policy.precision.torch_nvfp4 import NVFP4Weight

FUSE = (
    ("attn.to_q", "attn.to_k", "attn.to_v"),
    ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
)
SIZES = (32, 16, 48)


def linears(bias: bool = True) -> list[nn.Linear]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [nn.Linear(64, n, bias=bias and n != 16).requires_grad_(False) for n in SIZES]


def load_packed(layers, originals, backend, amax=None) -> None:
    for layer, linear in zip(layers, originals, strict=True):
        for part, tensor in backend.pack(linear.weight, True, amax).items():
            layer.wire_targets()[part].copy_(tensor)
    for layer in layers:
        layer.finish_loading()


@pytest.mark.parametrize("name", ["emulated_nvfp4", "fp8"])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_fused_product_equals_the_separate_products(name, bias):
    """Codes and scales are the same. On a CPU the products are equal bit for bit, because a sum
    over K does not depend on the number of rows of the weight.
    """
    backend, originals = BACKENDS[name], linears(bias)
    amax = torch.tensor(0.2) if name == "emulated_nvfp4" else None  # one range for all three layers
    members = fuse_linears(originals, backend.replacements("power_of_two"))
    replacement = backend.replacements("power_of_two")
    separate = [replacement(linear) for linear in originals]
    load_packed(members, originals, backend, amax)
    load_packed(separate, originals, backend, amax)
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1))
    for member, layer in zip(members, separate, strict=True):
        assert torch.equal(member(x), layer(x))
    x[0] += 1  # changed in place: the same object with another value, requested in another order
    for index in (2, 0, 0, 1):
        assert torch.equal(members[index](x), separate[index](x))


def test_group_computes_one_product_and_does_not_keep_it(monkeypatch):
    backend, originals = BACKENDS["fp8"], linears()
    members = fuse_linears(originals, backend.replacements("power_of_two"))
    load_packed(members, originals, backend)
    layer, calls = members[0].layer, []
    forward = type(layer).forward
    monkeypatch.setattr(type(layer), "forward", lambda self, x: calls.append(1) or forward(self, x))
    x = torch.randn(4, 64)
    for member in members:
        member(x)
    assert len(calls) == 1 and not members[0]._joint._parts and members[0]._joint._input is None
    members[1](torch.randn(4, 64))
    assert len(calls) == 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@torch.no_grad()
def test_compiled_group_is_one_product(monkeypatch):
    import torch._inductor.config as inductor

    class Attention(nn.Module):
        def __init__(self, members):
            super().__init__()
            self.to_q, self.to_k, self.to_v = members

        def forward(self, x):
            return self.to_q(x).sum(-1) + 2 * self.to_k(x).sum(-1) + 3 * self.to_v(x).sum(-1)

    products = []
    names = lambda graph: [str(node.target) for node in graph.nodes if node.op == "call_function"]  # noqa: E731
    monkeypatch.setattr(
        inductor,
        "post_grad_custom_post_pass",
        lambda g: products.append(sum("mm" in name for name in names(g))),
    )
    backend, originals = BACKENDS["fp8"], linears()
    members = fuse_linears(originals, backend.replacements("power_of_two"))
    load_packed(members, originals, backend)
    eager = Attention(members)
    compiled = torch.compile(eager, dynamic=False)
    for seed in (1, 2):
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(seed))
        # sums of 96 bfloat16 values in another order
        assert torch.allclose(compiled(x), eager(x), rtol=1e-5, atol=1e-4)
    assert products == [1] and members[0]._joint._input is None


def test_buffers_are_rows_of_the_fused_buffers_and_keep_their_addresses():
    backend, originals = BACKENDS["torch_nvfp4"], linears()
    members = fuse_linears(originals, NVFP4Weight)
    amax = torch.tensor(0.25)
    pointers = {name: buffer.data_ptr() for name, buffer in members[0].named_buffers()}
    assert set(pointers) == {f"layer.{name}" for name in ("codes", "swizzled", "amax", "factor")}
    assert not list(members[1].named_buffers())
    load_packed(members, originals, backend, amax)
    layer = members[0].layer
    assert {name: buffer.data_ptr() for name, buffer in members[0].named_buffers()} == pointers
    packed = [backend.pack(linear.weight, True, amax) for linear in originals]
    assert torch.equal(layer.codes, torch.cat([part["codes"] for part in packed]))
    assert torch.equal(layer.swizzled, swizzled(torch.cat([part["scales"] for part in packed])))
    assert layer.amax.item() == 0.25
    with pytest.raises(ValueError, match="packed with different amax"):
        load_packed(members, originals, backend)


def test_plan_fuses_only_completely_quantized_groups(family, transformer):
    stub = SimpleNamespace(modules_to_not_convert=family.modules_to_not_convert, fuse=FUSE)
    plan = {row.name: row.fused for row in quantize_plan(transformer, stub, (), BACKENDS["fp8"])}
    for block in (0, 1):
        for part in ("q", "k", "v"):
            assert (
                plan[f"transformer_blocks.{block}.attn.to_{part}"]
                == f"transformer_blocks.{block}.attn.to_q"
            )
            assert (
                plan[f"transformer_blocks.{block}.attn.add_{part}_proj"]
                == f"transformer_blocks.{block}.attn.add_q_proj"
            )
    assert plan["transformer_blocks.0.attn.to_out.0"] is None
    partly = {
        row.name: row.fused
        for row in quantize_plan(transformer, stub, ("*.0.attn.to_v",), BACKENDS["fp8"])
    }
    assert partly["transformer_blocks.0.attn.to_q"] is None
    assert partly["transformer_blocks.1.attn.to_q"] is not None
    for name in ("emulated_nvfp4", "fp32"):
        assert not any(row.fused for row in quantize_plan(transformer, stub, (), BACKENDS[name]))


def test_fused_explorer_generates_the_same_latents(family, adapted, cond, randomise, monkeypatch):
    """Both use the same published bytes, and loading keeps the addresses of all buffers."""
    randomise(adapted, "current", 2)
    backend, latents = BACKENDS["fp8"], []
    for fuse in ((), FUSE):
        monkeypatch.setattr(type(family), "fuse", fuse, raising=False)
        manifest, chunks, _ = Publisher(
            adapted, quantize_plan(adapted, family, (), backend), backend, 4096
        ).export("current", 0)
        explorer = Explorer(family, backend)
        pointers = {
            name: buffer.data_ptr() for name, buffer in explorer.transformer.named_buffers()
        }
        explorer.load(manifest, chunks)
        assert {
            name: buffer.data_ptr() for name, buffer in explorer.transformer.named_buffers()
        } == pointers
        assert any(
            isinstance(module, FusedMember) for module in explorer.transformer.modules()
        ) == bool(fuse)
        latents.append((manifest.hashes, explorer.explore(cond.rows(0), (5, 6), 3, "dpmpp_2m")[1]))
    assert latents[0][0] == latents[1][0]
    assert np.array_equal(latents[0][1], latents[1][1])


@pytest.mark.parametrize("frozen", [False, True])
def test_fused_layers_are_published_with_one_range(family, adapted, randomise, monkeypatch, frozen):
    """The range of the group is the largest of the three, because a kernel has one factor for the
    whole product. Weights without an adapter use the range of their group.
    """
    monkeypatch.setattr(type(family), "fuse", FUSE, raising=False)
    randomise(adapted, "current", 2)
    backend = BACKENDS["torch_nvfp4"]
    plan = quantize_plan(adapted, family, (), backend)
    publisher = Publisher(adapted, plan, backend, 2**20, frozen_amax=frozen)
    for version in (0, 1):
        manifest, chunks, _ = publisher.export("current", version)
        stored = {entry.name: entry for entry in manifest.entries}
        data = np.concatenate(chunks)

        def tensor(name: str, dtype: type, stored=stored, data=data) -> torch.Tensor:
            entry = stored[name]
            raw = data[entry.offset : entry.offset + entry.nbytes].copy()
            return torch.from_numpy(raw.view(dtype)).view(entry.shape)

        block = "transformer_blocks.0.attn"
        amax = [tensor(f"{block}.to_{part}.amax", np.float32) for part in "qkv"]
        assert amax[0] == amax[1] == amax[2]
        largest = []
        for part in "qkv":
            module = adapted.get_submodule(f"{block}.to_{part}")
            merged = module.base_layer.weight + module.get_delta_weight("current")
            codes, scales = (
                tensor(f"{block}.to_{part}.{what}", np.uint8) for what in ("codes", "scales")
            )
            error = (dequantize(Packed(codes, scales, amax[0])) - merged).norm() / merged.norm()
            assert error < 0.12
            largest.append(
                max(2 * module.base_layer.weight.abs().max(), merged.abs().max())
                if frozen
                else merged.abs().max()
            )
        assert amax[0] >= max(largest) * 0.999 if frozen else amax[0] == max(largest)
        randomise(adapted, "current", 9)


def test_non_finite_member_of_a_group_is_named(family, adapted, monkeypatch):
    monkeypatch.setattr(type(family), "fuse", FUSE, raising=False)
    backend = BACKENDS["torch_nvfp4"]
    name = "transformer_blocks.1.attn.to_v"
    with torch.no_grad():
        adapted.get_submodule(name).lora_B["current"].weight[3] = float("nan")
    with pytest.raises(NonFiniteWeights) as caught:
        Publisher(adapted, quantize_plan(adapted, family, (), backend), backend, 4096).export(
            "current", 0
        )
    assert caught.value.module == name


def test_swapping_a_group_frees_the_unquantized_weights(family, transformer, monkeypatch):
    import gc
    import weakref

    monkeypatch.setattr(type(family), "fuse", FUSE, raising=False)
    weight_reference = weakref.ref(
        transformer.get_submodule("transformer_blocks.0.attn.to_k").weight
    )
    swap_linears(
        transformer, quantize_plan(transformer, family, (), BACKENDS["fp8"]), BACKENDS["fp8"]
    )
    gc.collect()
    assert weight_reference() is None
