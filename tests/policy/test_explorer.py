"""The path of weights from the learner's adapters through the published bytes into explorers."""

import gc
import weakref

import numpy as np
import pytest
import torch

from learner.publish import NonFiniteWeights, Publisher, export_policy
from policy.explorer import Explorer
from policy.lora import adapted_modules, use_adapter
from policy.merging import merged_weights
from policy.precision.backends import BACKENDS
from policy.precision.emulated import EmulatedNVFP4Linear
from policy.precision.manifest import WireError
from policy.precision.nvfp4 import Packed, dequantize, quantize
from policy.precision.swap import quantize_plan
from policy.sampling.sample import sample

NVFP4, FP32, BF16, FP8 = (BACKENDS[name] for name in ("emulated_nvfp4", "fp32", "bf16", "fp8"))
SEEDS = (5, 6, 2**60)


def publisher(family, transformer, backend=NVFP4, modules_to_not_convert=(), shard_bytes=4096):
    return Publisher(
        transformer,
        quantize_plan(transformer, family, modules_to_not_convert, backend),
        backend,
        shard_bytes,
    )


def unpacked(layer: EmulatedNVFP4Linear) -> torch.Tensor:
    return dequantize(Packed(layer.codes, layer.scales, layer.amax))


def test_explorer_has_the_merged_weights(family, adapted, randomise):
    """Every quantized layer contains the packed merged weight, with and without an adapter."""
    randomise(adapted, "old", 1)
    manifest, chunks, _ = publisher(family, adapted).export("old", 4)
    explorer = Explorer(family, NVFP4)
    assert explorer.version is None
    assert explorer.load(manifest, chunks) == (4, manifest.checksum)
    assert explorer.version == 4
    expected = dict(merged_weights(adapted, "old"))
    base = family.load_transformer("cpu", torch.float32)
    for row in explorer.plan:
        layer = explorer.transformer.get_submodule(row.name)
        weight = expected.get(row.name, base.get_submodule(row.name).weight)
        assert (
            torch.equal(unpacked(layer), dequantize(quantize(weight, search=True)))
            if row.quantized
            else True
        )
        assert row.quantized or torch.equal(layer.weight, weight)
    # the feed-forward layers have no adapters
    assert sum(row.quantized and row.name not in expected for row in explorer.plan) == 6


def test_published_weights_use_four_and_a_half_bits_each(family, adapted):
    manifest, _, _ = publisher(family, adapted).export("current", 0)
    rows = [row for row in quantize_plan(adapted, family, (), NVFP4) if row.quantized]
    weights = sum(row.shape[0] * row.shape[1] for row in rows)
    assert manifest.nbytes == weights * 4.5 / 8 + 4 * len(rows)


def test_explorer_keeps_no_unquantized_copy(family, monkeypatch):
    """The test counts the bytes of parameters and buffers, and checks that the unquantized weights
    are garbage-collected.
    """
    loaded = {}
    load = type(family).load_transformer

    def load_and_record(self, *args):
        transformer = load(self, *args)
        loaded.update(
            {name: weakref.ref(parameter) for name, parameter in transformer.named_parameters()}
        )
        return transformer

    monkeypatch.setattr(type(family), "load_transformer", load_and_record)
    explorer = Explorer(family, NVFP4)
    gc.collect()
    quantized = {row.name: row.shape for row in explorer.plan if row.quantized}
    for name, parameter in loaded.items():
        is_weight = name.removesuffix(".weight") in quantized and name.endswith(".weight")
        assert (parameter() is None) == is_weight, name
    state = [*explorer.transformer.parameters(), *explorer.transformer.buffers()]
    elements = sum(n * k for n, k in quantized.values())
    unquantized = family.load_transformer("cpu", torch.float32)
    all_bytes = sum(t.numel() * 4 for t in [*unquantized.parameters(), *unquantized.buffers()])
    held_bytes = sum(t.numel() * t.element_size() for t in state)
    assert held_bytes == all_bytes - elements * 4 + elements * 4.5 / 8 + 4 * len(quantized)
    assert not any(
        isinstance(module, torch.nn.Module) and "ext_encoder" in str(type(module))
        for module in vars(explorer).values()
    )
    layers = [
        module
        for module in explorer.transformer.modules()
        if isinstance(module, EmulatedNVFP4Linear)
    ]
    assert {id(layer.workspace) for layer in layers} == {id(layers[0].workspace)}
    for layer in layers:  # a forward pass leaves no unquantized copy behind either
        layer(torch.ones(2, layer.in_features))
        tensors = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
        assert not tensors
        assert {name for name, _ in layer.named_buffers()} == {"codes", "scales", "amax"}


def test_fp32_explorer_generates_the_same_images_as_the_learner(family, adapted, cond, randomise):
    """The explorer merges the adapter into the weights, and the learner adds its output. So sums
    differ in order, with values of order 1, over 3 steps of a two-layer network.
    """
    randomise(adapted, "current", 2)
    explorer = Explorer(family, FP32)
    manifest, chunks, _ = publisher(family, adapted, FP32).export("current", 0)
    explorer.load(manifest, chunks)
    images, latents = explorer.explore(cond.rows(1), SEEDS, 3, "dpmpp_2m")
    assert images.dtype == np.uint8
    assert images.shape == (3, 3, 16, 16)
    assert latents.dtype == np.float32
    rows = cond.rows(1).repeat(3)
    with use_adapter(adapted, "current"):
        expected = sample(family, adapted, rows, SEEDS, 3, "dpmpp_2m")
    np.testing.assert_allclose(latents, expected, rtol=0, atol=1e-5)
    with use_adapter(adapted, None):
        assert (
            np.abs(latents - sample(family, adapted, rows, SEEDS, 3, "dpmpp_2m").numpy()).max()
            > 0.01
        )
    np.testing.assert_array_equal(
        images, family.decode(explorer.vae, torch.from_numpy(latents)).numpy()
    )


@pytest.mark.parametrize("backend", [NVFP4, BF16, FP8])
def test_low_precision_explorers_generate_nearly_the_same_images(
    family, adapted, cond, randomise, backend
):
    """The latents are close to those of the learner but not equal, which shows that the explorer
    runs in its declared precision.
    """
    randomise(adapted, "current", 2)
    explorer = Explorer(family, backend)
    manifest, chunks, _ = publisher(family, adapted, backend).export("current", 0)
    explorer.load(manifest, chunks)
    _, latents = explorer.explore(cond.rows(1), SEEDS, 3, "dpmpp_2m")
    expected = sample(family, adapted, cond.rows(1).repeat(3), SEEDS, 3, "dpmpp_2m").numpy()
    error = np.linalg.norm(latents - expected) / np.linalg.norm(expected)
    assert 1e-4 < error < 0.05
    again = Explorer(family, backend)
    again.load(manifest, chunks)
    np.testing.assert_array_equal(again.explore(cond.rows(1), SEEDS, 3, "dpmpp_2m")[1], latents)


def test_generated_pool_does_not_depend_on_earlier_calls(family, adapted, cond):
    explorer = Explorer(family, NVFP4)
    manifest, chunks, _ = publisher(family, adapted).export("current", 0)
    explorer.load(manifest, chunks)
    first, _ = explorer.explore(cond.rows(0), SEEDS, 2, "dpmpp_2m")
    explorer.explore(cond.rows(1), (1, 2, 3, 4, 5), 3, "euler")
    np.testing.assert_array_equal(explorer.explore(cond.rows(0), SEEDS, 2, "dpmpp_2m")[0], first)


@pytest.mark.parametrize("backend", [NVFP4, FP8])
def test_explorer_has_a_version_only_after_a_complete_load(
    family, adapted, cond, randomise, backend
):
    explorer = Explorer(family, backend)
    with pytest.raises(RuntimeError, match="no policy version is loaded"):
        explorer.explore(cond.rows(0), SEEDS, 2, "euler")
    publish = publisher(family, adapted, backend)
    manifest, chunks, _ = publish.export("current", 1)
    explorer.load(manifest, chunks)
    pointers = {name: buffer.data_ptr() for name, buffer in explorer.transformer.named_buffers()}
    before = {name: buffer.clone() for name, buffer in explorer.transformer.named_buffers()}
    randomise(adapted, "current", 3)
    newer, damaged, _ = publish.export("current", 2)
    damaged[1][7] ^= 1
    with pytest.raises(WireError, match="version 2: shard 1 is damaged"):
        explorer.load(newer, damaged)
    assert explorer.version is None
    assert all(
        torch.equal(buffer, before[name]) for name, buffer in explorer.transformer.named_buffers()
    )
    with pytest.raises(RuntimeError, match="no policy version is loaded"):
        explorer.explore(cond.rows(0), SEEDS, 2, "euler")
    damaged[1][7] ^= 1
    assert explorer.load(newer, damaged)[0] == explorer.version == 2
    assert {
        name: buffer.data_ptr() for name, buffer in explorer.transformer.named_buffers()
    } == pointers
    assert any(
        not torch.equal(buffer, before[name])
        for name, buffer in explorer.transformer.named_buffers()
    )
    with pytest.raises(ValueError, match="conditioning of 2 rows: explore accepts one prompt"):
        explorer.explore(cond, SEEDS, 2, "euler")


def test_explorer_refuses_weights_of_another_format_or_plan(family, adapted):
    manifest, chunks, _ = publisher(family, adapted, FP32).export("current", 0)
    with pytest.raises(
        WireError, match="version 0 is fp32, but backend emulated_nvfp4 needs nvfp4"
    ):
        Explorer(family, NVFP4).load(manifest, chunks)
    manifest, chunks, _ = publisher(family, adapted, FP8).export("current", 0)
    with pytest.raises(WireError, match="version 0 is fp8, but backend emulated_nvfp4 needs nvfp4"):
        Explorer(family, NVFP4).load(manifest, chunks)
    manifest, chunks, _ = publisher(family, adapted, modules_to_not_convert=["*.ff.*"]).export(
        "current", 0
    )
    with pytest.raises(
        WireError,
        match=r"lacks 'transformer_blocks.0.ff.net.0.proj.amax'.*same model and explore\.modules",
    ):
        Explorer(family, NVFP4).load(manifest, chunks)


def test_unquantized_adapted_modules_are_published_merged(family, adapted, randomise):
    randomise(adapted, "current", 4)
    patterns = ["transformer_blocks.0.*"]
    manifest, chunks, _ = publisher(family, adapted, modules_to_not_convert=patterns).export(
        "current", 0
    )
    explorer = Explorer(family, NVFP4, patterns)
    explorer.load(manifest, chunks)
    merged = dict(merged_weights(adapted, "current"))
    name = "transformer_blocks.0.attn.to_q"
    assert torch.equal(explorer.transformer.get_submodule(name).weight, merged[name])
    assert not any(entry.name.startswith("transformer_blocks.0.ff") for entry in manifest.entries)


def test_missing_trained_module_is_detected(family, adapted, randomise):
    """One trained layer is left out of the published weights, and all checksums are right. An
    explorer that accepted them would use the base model's weights for this layer.
    """
    randomise(adapted, "current", 4)
    patterns = ["transformer_blocks.0.*"]
    rows = quantize_plan(adapted, family, patterns, NVFP4)
    missing_layer = "transformer_blocks.0.attn.to_out.0"
    adapted.set_submodule(missing_layer, adapted.get_submodule(missing_layer).base_layer)
    manifest, shards, _ = Publisher(adapted, rows, NVFP4, 4096).export("current", 0)
    explorer = Explorer(family, NVFP4, patterns, trained=family.lora_targets)
    with pytest.raises(WireError, match=f"version 0 lacks '{missing_layer}.weight'"):
        explorer.load(manifest, shards)
    Explorer(family, NVFP4, patterns).load(manifest, shards)  # not detected without ``trained``


def test_non_finite_weights_are_not_published(family, adapted):
    publish = publisher(family, adapted)
    publish.export("current", 0)
    name = "transformer_blocks.1.attn.to_k"
    with torch.no_grad():
        adapted.get_submodule(name).lora_B["current"].weight[3] = float("nan")
    with pytest.raises(NonFiniteWeights, match=f"the weights of '{name}' are not finite") as caught:
        publish.export("current", 1)
    assert caught.value.module == name
    columns = adapted.get_submodule(name).in_features
    assert f"{columns} of " in str(caught.value) and "lower optimizer.lr" in str(caught.value)


def test_export_statistics_compare_with_the_previous_export(family, adapted, randomise):
    """The test computes both statistics from the weights that the explorer loaded and from the
    merged weights.
    """
    publish, explorer = publisher(family, adapted), Explorer(family, NVFP4)
    names = [name for name, _ in merged_weights(adapted, None)]

    def export(version):
        manifest, chunks, statistics = publish.export("current", version)
        explorer.load(manifest, chunks)
        layers = [explorer.transformer.get_submodule(name) for name in names]
        nibbles = torch.cat(
            [torch.stack([layer.codes & 15, layer.codes >> 4]).flatten() for layer in layers]
        )
        decoded = torch.cat([unpacked(layer).flatten() for layer in layers]).double()
        return (
            statistics,
            nibbles,
            decoded,
            torch.cat([w.flatten() for _, w in merged_weights(adapted, "current")]).double(),
        )

    first, codes, decoded, merged = export(0)
    assert first == {}
    again, *_ = export(1)
    assert again == {"weights/codes_changed": 0.0}
    randomise(adapted, "current", 7)
    statistics, codes_after, decoded_after, merged_after = export(2)
    assert statistics["weights/codes_changed"] == pytest.approx(
        (codes != codes_after).double().mean().item(), abs=1e-12
    )
    cosine = torch.cosine_similarity(decoded_after - decoded, merged_after - merged, dim=0).item()
    # the difference of two float32 weights loses digits
    assert statistics["weights/delta_cosine"] == pytest.approx(cosine, abs=1e-5)
    assert 0.9 < cosine < 1
    assert export(3)[0] == {"weights/codes_changed": 0.0}  # compared with version 2


def test_packed_copies_do_not_stay_on_the_learner_device(family, adapted, monkeypatch, randomise):
    """When a weight is packed, no packed tensor of the weights before may still exist."""
    alive: list[weakref.ref[torch.Tensor]] = []
    pack = type(NVFP4).pack

    def pack_and_record(self, *arguments):
        assert not any(reference() is not None for reference in alive)
        parts = pack(self, *arguments)
        alive.extend(weakref.ref(tensor) for tensor in parts.values())
        return parts

    monkeypatch.setattr(type(NVFP4), "pack", pack_and_record)
    publish = publisher(family, adapted)
    for version in range(3):
        randomise(adapted, "current", version)
        publish.export("current", version)
    assert len(alive) == 3 * (21 + 15 + 15)


def test_constant_weights_are_sent_once(family, adapted, randomise):
    """A second version needs none of the shards of the six modules without an adapter. An explorer
    that loads only its changed shards after the first version gets the same weights as a new
    explorer that loads all shards.
    """
    publish = publisher(family, adapted)
    first, chunks, _ = publish.export("old", 0)
    randomise(adapted, "old", 1)
    second, again, _ = publish.export("old", 1)
    needed = second.changed_since(first)
    merged = {name for name, _ in adapted_modules(adapted)}
    constant = [e for e in second.entries if e.name.rpartition(".")[0] not in merged]
    skipped_bytes = sum(size for i, size in enumerate(second.shard_sizes) if i not in needed)
    assert skipped_bytes == sum(entry.nbytes for entry in constant) > 0.2 * second.nbytes
    explorer, new = Explorer(family, NVFP4), Explorer(family, NVFP4)
    explorer.load(first, chunks)
    new.load(second, again)
    part = [shard if index in needed else None for index, shard in enumerate(again)]
    with pytest.raises(WireError, match="shard 0 was not sent, and nothing is held here"):
        Explorer(family, NVFP4).load(second, part)
    assert explorer.load(second, part) == (1, second.checksum)
    for name, tensor in new.transformer.state_dict().items():
        assert torch.equal(explorer.transformer.state_dict()[name], tensor)


def test_modules_without_adapter_are_packed_once(family, adapted, monkeypatch):
    packed = []
    pack = type(NVFP4).pack
    monkeypatch.setattr(
        type(NVFP4),
        "pack",
        lambda self, weight, *more: packed.append(weight.shape) or pack(self, weight, *more),
    )
    publish = publisher(family, adapted)
    first, chunks, _ = publish.export("current", 0)
    assert len(packed) == 21
    second, again, _ = publish.export("current", 1)
    assert len(packed) == 21 + 15
    assert first.hashes == second.hashes and first.checksum != second.checksum
    alone, _ = export_policy(
        adapted, "current", quantize_plan(adapted, family, (), NVFP4), NVFP4, 1, 4096
    )
    assert alone == second
