"""1x1 convolutions run as linear layers: their plan, their layers, publishing with an adapter on
them, and loading in place.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from configs.training import Lora
from learner.publish import Publisher
from policy.explorer import Explorer
from policy.lora import add_adapters
from policy.merging import delta_weight
from policy.precision.backends import BACKENDS
from policy.precision.layer import PointwiseConvolution
from policy.precision.swap import as_linear, quantize_plan, swap_linears

QUANTIZED = ("emulated_nvfp4", "fp8")


class Mixer(nn.Module):
    """A small SANA feed-forward (1x1, depthwise 3x3, 1x1), a linear layer, and layers that cannot
    be quantized.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv_inverted = nn.Conv2d(32, 64, 1)
        self.conv_depth = nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.conv_point = nn.Conv2d(64, 32, 1, bias=False)
        self.proj = nn.Linear(32, 32)
        self.narrow = nn.Conv2d(24, 32, 1)
        self.strided = nn.Conv2d(32, 32, 1, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv_point(torch.tanh(self.conv_depth(self.conv_inverted(x))))
        return self.proj(y.movedim(1, -1)).movedim(-1, 1)


def make_mixer() -> Mixer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Mixer().eval().requires_grad_(False)


@pytest.fixture
def family():
    """A fake family with only the parts that an explorer and an adapter need."""
    return SimpleNamespace(
        modules_to_not_convert=(),
        fuse=(),
        lora_targets=("conv_point", "proj"),
        load_transformer=lambda *args: make_mixer(),
        load_vae=lambda *args: None,
    )


@pytest.fixture
def features() -> torch.Tensor:
    return torch.randn(2, 32, 5, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", QUANTIZED)
def test_plan_includes_1x1_convolutions(family, name):
    plan = {row.name: row for row in quantize_plan(make_mixer(), family, (), BACKENDS[name])}
    assert {row for row, entry in plan.items() if entry.quantized} == {
        "conv_inverted",
        "conv_point",
        "proj",
    }
    assert plan["conv_inverted"].why == "a 1x1 convolution, run as a linear layer"
    assert plan["conv_inverted"].shape == (64, 32, 1, 1)
    assert plan["conv_depth"].why == "a convolution of 3x3 in 64 groups"
    assert plan["narrow"].why == "K = 24 is not a multiple of 16"
    assert plan["strided"].why == "a convolution of 1x1"


def test_pointwise_convolution_equals_the_linear_layer_of_its_pixels(features):
    conv = make_mixer().conv_inverted
    linear = as_linear(conv)
    assert linear.weight.data_ptr() == conv.weight.data_ptr() and linear.bias is conv.bias
    expected = torch.nn.functional.linear(
        features.movedim(1, -1), conv.weight[:, :, 0, 0], conv.bias
    ).movedim(-1, 1)
    actual = PointwiseConvolution(linear)(features)
    assert torch.equal(actual, expected)
    # sums of 32 products of order 1, in another order
    assert torch.allclose(actual, conv(features), atol=32 * 2.0**-24 * 32)


@pytest.mark.parametrize("name", QUANTIZED)
@torch.no_grad()
def test_quantized_convolutions_are_published_with_their_adapter_and_loaded_in_place(
    family, features, name
):
    backend = BACKENDS[name]
    learner = make_mixer()
    add_adapters(learner, Lora(rank=4, alpha=8), family, names=("current",), seed=1)  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(2)
    for module in (learner.conv_point, learner.proj):
        module.lora_B["current"].weight.copy_(
            torch.randn(module.lora_B["current"].weight.shape, generator=generator) * 0.3
        )
    plan = quantize_plan(learner, family, (), backend)  # pyright: ignore[reportArgumentType]
    assert plan == quantize_plan(make_mixer(), family, (), backend)  # pyright: ignore[reportArgumentType]
    publisher = Publisher(learner, plan, backend, 4096)
    explorer = Explorer(family, backend)  # pyright: ignore[reportArgumentType]
    pointers = {key: buffer.data_ptr() for key, buffer in explorer.transformer.named_buffers()}
    manifest, chunks, _ = publisher.export("current", 0)
    explorer.load(manifest, chunks)
    assert {
        key: buffer.data_ptr() for key, buffer in explorer.transformer.named_buffers()
    } == pointers

    layer = explorer.transformer.get_submodule("conv_point").linear
    merged = make_mixer().conv_point.weight[:, :, 0, 0] + delta_weight(
        learner.conv_point, "current"
    )
    packed = backend.pack(merged, True)
    assert all(torch.equal(buffer, packed[part]) for part, buffer in layer.named_buffers())
    expected = learner(features)
    error = ((explorer.transformer(features) - expected).norm() / expected.norm()).item()
    # the error for Gaussian operands; three layers follow each other, with a margin of one half
    one_layer = 0.13 if name == "emulated_nvfp4" else 0.037
    assert 1e-4 < error < one_layer * 3**0.5 * 1.5
    # without the adapter the output is different
    assert (make_mixer()(features) - expected).norm() / expected.norm() > 2 * error

    learner.conv_point.lora_B["current"].weight.mul_(1.5)
    manifest, chunks, statistics = publisher.export("current", 1)
    explorer.load(manifest, chunks)
    assert {
        key: buffer.data_ptr() for key, buffer in explorer.transformer.named_buffers()
    } == pointers
    assert 0 < statistics["weights/codes_changed"] < 1
    assert 0.7 < statistics["weights/delta_cosine"] < 1


def test_unquantized_adapted_convolution_is_published_in_its_own_shape(family, features):
    learner = make_mixer()
    add_adapters(learner, Lora(rank=4, alpha=8), family, names=("current",), seed=1)
    with torch.no_grad():
        learner.conv_point.lora_B["current"].weight.fill_(0.1)
    backend = BACKENDS["emulated_nvfp4"]
    plan = quantize_plan(learner, family, ("conv_point",), backend)
    explorer = Explorer(family, backend, ("conv_point",))
    publisher = Publisher(learner, plan, backend, 4096)
    manifest, chunks, _ = publisher.export("current", 0)
    explorer.load(manifest, chunks)
    entry = next(entry for entry in manifest.entries if entry.name == "conv_point.weight")
    assert entry.shape == (32, 64, 1, 1)
    delta = delta_weight(learner.conv_point, "current")
    assert torch.equal(
        explorer.transformer.conv_point.weight,
        learner.conv_point.base_layer.weight + delta.view(32, 64, 1, 1),
    )
    with torch.no_grad():
        learner.conv_point.lora_B["current"].weight.fill_(0.2)
    # only the rounding of W + B A changes the cosine
    assert publisher.export("current", 1)[2]["weights/delta_cosine"] == pytest.approx(1, abs=1e-6)


def test_swapping_frees_the_unquantized_weights(family):
    import gc
    import weakref

    module = make_mixer()
    weights = [weakref.ref(module.conv_point.weight), weakref.ref(module.conv_inverted.weight)]
    swap_linears(module, quantize_plan(module, family, (), BACKENDS["fp8"]), BACKENDS["fp8"])
    gc.collect()
    assert all(weight() is None for weight in weights)
