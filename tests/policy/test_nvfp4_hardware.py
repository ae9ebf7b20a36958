"""NVFP4 kernels: what a CPU can tell of them, and comparisons with the emulation that run where a
Blackwell GPU is.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from policy.precision.backends import BACKENDS
from policy.precision.hardware import NVFP4Weight, TorchNVFP4Linear, nvfp4_recipe, scaled_mm
from policy.precision.layer import LastInput, padded_rows, swizzled
from policy.precision.nvfp4 import Packed, dequantise, pack_activation, quantise_activation

CUDA = torch.device("cuda")
HARDWARE = ("torch_nvfp4", "te_nvfp4")


def refusal(name: str) -> str | None:
    return BACKENDS[name].unavailable(CUDA)


def on_gpu(name: str):
    return pytest.param(
        name, marks=pytest.mark.skipif(refusal(name) is not None, reason=f"{name}: {refusal(name)}")
    )


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (130, 5), (256, 12), (24, 4)])
def test_the_order_of_scales_is_the_documented_one(shape):
    """Byte 16 (r % 32) + 4 (r // 32) + c of its 128 x 4 tile, tiles along the columns first, zeros
    where nothing was.
    """
    n, c = shape
    scales = torch.randint(
        1, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    tile_rows, tile_columns = -(-n // 128), -(-c // 4)
    wanted = [0] * (tile_rows * tile_columns * 512)
    for row in range(n):
        for column in range(c):
            tile = (row // 128) * tile_columns + column // 4
            wanted[tile * 512 + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4] = int(
                scales[row, column]
            )
    assert swizzled(scales).tolist() == wanted


def test_rows_are_padded_with_zeros():
    rows = torch.randn(17, 32)
    padded = padded_rows(rows)
    assert padded.shape == (32, 32) and torch.equal(padded[:17], rows) and not padded[17:].any()
    assert padded_rows(rows[:16]).data_ptr() == rows.data_ptr()


def test_padding_changes_no_row():
    """Zero rows have neither a larger amax nor blocks of their own."""
    rows = torch.randn(17, 64, generator=torch.Generator().manual_seed(0))
    alone, padded = pack_activation(rows), pack_activation(padded_rows(rows))
    assert torch.equal(padded.codes[:17], alone.codes) and torch.equal(
        padded.scales[:17], alone.scales
    )
    assert padded.amax == alone.amax and not padded.codes[17:].any()


@pytest.mark.parametrize("exact", [False, True])
def test_packed_activations_decode_to_the_emulated_ones(exact):
    """q sf amax / 2688 both ways; two float32 roundings of the unit or one of the product."""
    rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * 3
    operand, amax = quantise_activation(rows, exact)
    wanted = operand.double() * amax.double() / 2688
    assert torch.allclose(
        dequantise(pack_activation(rows, exact)).double(), wanted, rtol=4 * 2.0**-24, atol=0
    )
    assert (amax.item() == rows.abs().max().item()) == exact


@pytest.mark.parametrize("name", HARDWARE)
def test_which_shapes_the_kernels_take(name):
    backend = BACKENDS[name]
    assert backend.refuses(32, 64) is None
    assert backend.refuses(24, 64) == "N = 24 is not a multiple of 16"
    assert (
        backend.refuses(32, 40)
        == f"K = 40 is not a multiple of {32 if name == 'torch_nvfp4' else 16}"
    )
    assert (backend.refuses(32, 48) is None) == (name == "te_nvfp4")


def test_published_weights_arrive_in_place_and_in_order():
    linear = nn.Linear(96, 32)
    layer = NVFP4Weight(linear)
    packed = BACKENDS["torch_nvfp4"].pack(linear.weight, True)
    targets = layer.wire_targets()
    assert {name: tensor.shape for name, tensor in targets.items()} == {
        name: tensor.shape for name, tensor in packed.items()
    }
    pointers = {name: buffer.data_ptr() for name, buffer in layer.named_buffers()}
    for name, tensor in packed.items():
        targets[name].copy_(tensor)
    layer.arrived()
    assert {name: buffer.data_ptr() for name, buffer in layer.named_buffers()} == pointers
    assert torch.equal(layer.swizzled, swizzled(packed["scales"])) and layer.amax.tolist() == [
        packed["amax"].item()
    ]
    assert torch.equal(
        dequantise(Packed(layer.codes, layer.compact, layer.amax.view(()))),
        dequantise(Packed(**packed)),
    )
    assert layer.bfloat16().amax.dtype == torch.float32


def test_torch_accepts_the_arguments():
    """torch's own check of shapes, types and strides for CUDA, which it makes of tensors without
    data too.
    """
    x = Packed(
        torch.empty(48, 32, dtype=torch.uint8, device="meta"),
        torch.empty(48, 4, dtype=torch.uint8, device="meta"),
        torch.empty((), device="meta"),
    )
    codes, amax = (
        torch.empty(32, 32, dtype=torch.uint8, device="meta"),
        torch.empty(1, device="meta"),
    )
    y = scaled_mm(x, codes, torch.empty(128 * 4, dtype=torch.uint8, device="meta"), amax)
    assert y.shape == (48, 32) and y.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="(?i)scale"):
        scaled_mm(x, codes, torch.empty(128 * 3, dtype=torch.uint8, device="meta"), amax)
    with pytest.raises(RuntimeError, match="divisible by 16"):  # K = 48: why the backend refuses it
        scaled_mm(
            Packed(x.codes[:, :24], x.scales[:, :3], x.amax),
            codes[:, :24],
            torch.empty(512, dtype=torch.uint8, device="meta"),
            amax,
        )


def test_a_whole_layer_passes_torchs_check():
    layer = TorchNVFP4Linear(
        nn.Linear(64, 32, device="meta", dtype=torch.bfloat16), LastInput(), False
    )
    y = layer(torch.empty(3, 5, 64, device="meta", dtype=torch.bfloat16))
    assert y.shape == (3, 5, 32) and y.dtype == torch.bfloat16


def test_the_recipe_scales_activations_by_row_unless_exact():
    recipes = SimpleNamespace(NVFP4BlockScaling=SimpleNamespace)
    tricks_off = {
        "disable_rht": True,
        "disable_stochastic_rounding": True,
        "disable_2d_quantization": True,
    }
    assert vars(nvfp4_recipe(recipes, "power_of_two")) == {
        **tricks_off,
        "row_scaled_activation": True,
    }
    assert vars(nvfp4_recipe(recipes, "exact")) == {**tricks_off, "row_scaled_activation": False}


# ---- where a Blackwell GPU is


def layers_on_gpu(name: str) -> tuple[nn.Module, nn.Module]:
    """The backend's layer and the emulated one, with the same packed weight."""
    linear = nn.Linear(256, 128).to(CUDA, torch.bfloat16)
    layers = []
    for backend in (BACKENDS[name], BACKENDS["emulated_nvfp4"]):
        layer = backend.replacements("exact")(linear)
        for part, tensor in backend.pack(linear.weight, True).items():
            layer.wire_targets()[part].copy_(tensor)
        layer.arrived()
        layers.append(layer)
    return layers[0], layers[1]


@pytest.mark.parametrize("name", [on_gpu(name) for name in HARDWARE])
@pytest.mark.parametrize("rows", [48, 7])
@torch.no_grad()
def test_kernels_equal_the_emulation(name, rows):
    """Same codes, same scales: float32 sums in another order, rounded to bfloat16, twice where the
    bias is added apart.
    """
    layer, emulated = layers_on_gpu(name)
    x = torch.randn(rows, 256, device=CUDA, dtype=torch.bfloat16)
    found, wanted = layer(x).double(), emulated(x).double()
    assert ((found - wanted).abs() <= 2.0**-7 * wanted.abs() + 2.0**-7 * wanted.abs().mean()).all()


@pytest.mark.parametrize("name", [on_gpu(name) for name in HARDWARE])
@torch.no_grad()
def test_a_captured_graph_survives_a_load(name):
    layer, _ = layers_on_gpu(name)
    x = torch.randn(32, 256, device=CUDA, dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    packed = BACKENDS[name].pack(torch.randn(128, 256), True)
    for part, tensor in packed.items():
        layer.wire_targets()[part].copy_(tensor)
    layer.arrived()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, layer(x))


@pytest.mark.parametrize("name", [on_gpu(name) for name in HARDWARE])
@torch.no_grad()
def test_a_neighbour_changes_nothing_on_the_gpu(name):
    linear = nn.Linear(256, 128).to(CUDA, torch.bfloat16)
    layer = BACKENDS[name].replacements("power_of_two")(linear)
    for part, tensor in BACKENDS[name].pack(linear.weight, True).items():
        layer.wire_targets()[part].copy_(tensor)
    layer.arrived()
    x = torch.randn(32, 256, device=CUDA, dtype=torch.bfloat16)
    loud = x.clone()
    loud[16:] *= 3
    assert torch.equal(layer(x)[:16], layer(loud)[:16])
