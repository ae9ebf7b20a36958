"""NVFP4 kernels: tests that run on a CPU, and comparisons with the emulation that run on a
Blackwell GPU.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from policy.device import torch_release
from policy.precision import te_nvfp4
from policy.precision.backends import BACKENDS
from policy.precision.compiling import compiled
from policy.precision.history import AmaxHistory, PassCounter
from policy.precision.layer import LastInput, padded_rows, swizzled
from policy.precision.nvfp4 import (
    SPAN_INVERSE,
    Packed,
    dequantize,
    expected_amax,
    pack_activation,
    quantize_activation,
)
from policy.precision.te_nvfp4 import EngineLinear, nvfp4_recipe
from policy.precision.torch_nvfp4 import (
    NVFP4Weight,
    Operand,
    TorchNVFP4Linear,
    pack_operand,
    scaled_mm,
)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
HARDWARE = ("torch_nvfp4", "te_nvfp4")


def refusal(name: str) -> str | None:
    return BACKENDS[name].unavailable_reason(CUDA)


def on_gpu(name: str):
    return pytest.param(
        name, marks=pytest.mark.skipif(refusal(name) is not None, reason=f"{name}: {refusal(name)}")
    )


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (130, 5), (256, 12), (24, 4)])
def test_scales_are_in_the_documented_order(shape):
    """A scale is at byte 16 (r % 32) + 4 (r // 32) + c of its 128 x 4 tile. Tiles are ordered along
    the columns first. Unused bytes are zero.
    """
    n, c = shape
    scales = torch.randint(
        1, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    tile_rows, tile_columns = -(-n // 128), -(-c // 4)
    expected = [0] * (tile_rows * tile_columns * 512)
    for row in range(n):
        for column in range(c):
            tile = (row // 128) * tile_columns + column // 4
            expected[tile * 512 + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4] = int(
                scales[row, column]
            )
    assert swizzled(scales).tolist() == expected


def test_rows_are_padded_with_zeros():
    rows = torch.randn(17, 32)
    padded = padded_rows(rows)
    assert padded.shape == (32, 32) and torch.equal(padded[:17], rows) and not padded[17:].any()
    assert padded_rows(rows[:16]).data_ptr() == rows.data_ptr()


def test_padding_does_not_change_packed_rows():
    """Zero rows do not change amax and share no block with other rows."""
    rows = torch.randn(17, 64, generator=torch.Generator().manual_seed(0))
    alone, padded = pack_activation(rows), pack_activation(padded_rows(rows))
    assert torch.equal(padded.codes[:17], alone.codes)
    assert torch.equal(padded.scales[:17], alone.scales)
    assert padded.amax == alone.amax and not padded.codes[17:].any()


@pytest.mark.parametrize("exact", [False, True])
def test_packed_activations_decode_to_the_emulated_values(exact):
    """Both decode to q sf amax / 2688. The tolerance covers two float32 roundings of the unit and
    one of the product.
    """
    rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * 3
    operand, amax = quantize_activation(rows, exact)
    expected = operand.double() * amax.double() / 2688
    assert torch.allclose(
        dequantize(pack_activation(rows, exact)).double(), expected, rtol=4 * 2.0**-24, atol=0
    )
    assert (amax.item() == rows.abs().max().item()) == exact


@pytest.mark.parametrize("name", HARDWARE)
def test_kernels_refuse_unsupported_shapes(name):
    backend = BACKENDS[name]
    assert backend.unsupported_reason(32, 64) is None
    assert backend.unsupported_reason(24, 64) == "N = 24 is not a multiple of 16"
    assert backend.unsupported_reason(32, 48) == "K = 48 is not a multiple of 32"


def test_published_weights_are_loaded_in_place_and_in_order():
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
    layer.finish_loading()
    assert {name: buffer.data_ptr() for name, buffer in layer.named_buffers()} == pointers
    assert torch.equal(layer.swizzled, swizzled(packed["scales"]))
    assert layer.amax.tolist() == [packed["amax"].item()]
    assert layer.factor.tolist() == [(packed["amax"] * SPAN_INVERSE).item()]
    assert torch.equal(
        dequantize(Packed(layer.codes, layer.compact, layer.amax.view(()))),
        dequantize(Packed(**packed)),
    )
    assert layer.bfloat16().amax.dtype == layer.factor.dtype == torch.float32


@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32])
def test_torch_accepts_the_arguments_of_the_product(bias):
    """torch checks shapes, types and strides for CUDA also on tensors without data."""
    codes, factor = torch.empty(32, 32, dtype=torch.uint8), torch.empty(1)
    x = Operand(
        torch.empty(48, 32, dtype=torch.uint8), torch.empty(512, dtype=torch.uint8), factor.view(())
    )
    x, codes, factor = Operand(*(t.to("meta") for t in x)), codes.to("meta"), factor.to("meta")
    scales = torch.empty(128 * 4, dtype=torch.uint8, device="meta")
    added = None if bias is None else torch.empty(32, dtype=bias, device="meta")
    y = scaled_mm(x, codes, scales, factor, added)
    assert y.shape == (48, 32) and y.dtype == torch.bfloat16
    if torch_release() >= (2, 14):  # checks these on a GPU only
        return
    with pytest.raises(RuntimeError, match="(?i)scale"):
        scaled_mm(x, codes, scales[: 128 * 3], factor, added)
    # K = 48, which the backend therefore refuses
    with pytest.raises(RuntimeError, match="divisible by 16"):
        scaled_mm(x._replace(codes=x.codes[:, :24]), codes[:, :24], scales, factor)


@pytest.mark.parametrize("history", [None, AmaxHistory(torch.device("meta"))])
def test_complete_layer_passes_the_checks_of_torch(history):
    layer = TorchNVFP4Linear(
        nn.Linear(64, 32, device="meta", dtype=torch.bfloat16), LastInput(), False, history
    )
    y = layer(torch.empty(3, 5, 64, device="meta", dtype=torch.bfloat16))
    assert y.shape == (3, 5, 32) and y.dtype == torch.bfloat16


def test_operand_equals_the_eager_packing():
    x = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(0))
    packed = pack_activation(padded_rows(x.flatten(0, 1)))
    operand = pack_operand(x, False)
    assert torch.equal(operand.codes, packed.codes) and operand.codes.shape == (32, 24)
    assert torch.equal(operand.scales, swizzled(packed.scales))
    assert operand.factor == packed.amax * SPAN_INVERSE


def test_operand_of_the_previous_pass_equals_the_eager_packing():
    x = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(0))
    history = AmaxHistory(torch.device("cpu"))
    first = pack_operand(x, False, history)
    assert torch.equal(first.codes, pack_operand(x, False).codes)
    history.previous.copy_(history.current)
    history.known = True
    operand = pack_operand(x / 2, False, history)
    amax = expected_amax(x.abs().max())
    packed = pack_activation(padded_rows(x.flatten(0, 1) / 2), amax=amax)
    assert torch.equal(operand.codes, packed.codes)
    assert torch.equal(operand.scales, swizzled(packed.scales))
    assert operand.factor == amax * SPAN_INVERSE


def engine(calls: list[torch.Tensor]) -> SimpleNamespace:
    """A fake TransformerEngine with everything that a layer over packed weights uses."""
    return SimpleNamespace(
        NVFP4Quantizer=SimpleNamespace,
        NVFP4Tensor=lambda shape, dtype, **parts: torch.empty(shape, dtype=dtype, device="meta"),
        DType=SimpleNamespace(kFloat4E2M1=0),
        Linear=lambda k, n, **_: SimpleNamespace(
            eval=lambda: lambda x: calls.append(x) or x.new_zeros(len(x), n)
        ),
        autocast=lambda **_: contextlib.nullcontext(),
    )


def test_transformer_engine_gets_padded_rows_up_to_its_index_limit(monkeypatch):
    """SD3.5 Large's text at batch size 8 has 2,664 rows, which are 83 times 32 plus 8."""
    calls: list[torch.Tensor] = []
    layer = EngineLinear(nn.Linear(64, 32, bias=False), engine(calls), None)
    assert layer(torch.ones(8, 333, 64)).shape == (8, 333, 32) and len(calls[0]) == 2688
    monkeypatch.setattr(te_nvfp4, "INDEXED", 2664 * 64)
    with pytest.raises(ValueError, match="te_nvfp4: 170496 elements .* lower explore.chunk_size"):
        layer(torch.ones(8, 333, 64))


def test_transformer_engine_layers_are_used_only_for_an_exact_range(monkeypatch):
    """Only an exact range uses the layers of TransformerEngine. Otherwise te_nvfp4 uses the layers
    of torch_nvfp4. Compiling TransformerEngine's layers is refused with a clear message.
    """
    recipes = SimpleNamespace(NVFP4BlockScaling=SimpleNamespace)
    monkeypatch.setattr(te_nvfp4, "import_engine", lambda: (engine([]), recipes))
    linear, backend = nn.Linear(64, 32), BACKENDS["te_nvfp4"]
    assert type(backend.replacements("power_of_two")(linear)) is TorchNVFP4Linear
    layer = backend.replacements("exact")(linear)
    assert type(layer) is EngineLinear
    with pytest.raises(ValueError, match="^compile: torch.compile cannot trace .* torch_nvfp4"):
        compiled(nn.Sequential(layer), torch.device("cpu"))


def test_recipe_disables_the_training_options():
    recipes = SimpleNamespace(NVFP4BlockScaling=SimpleNamespace)
    assert vars(nvfp4_recipe(recipes)) == {
        "disable_rht": True,
        "disable_stochastic_rounding": True,
        "disable_2d_quantization": True,
    }


# ---- tests on a Blackwell GPU


def layers_on_gpu(name: str, amax: str = "exact") -> tuple[nn.Module, nn.Module]:
    """Return the layer of the backend and the emulated layer, with the same packed weight."""
    linear = nn.Linear(256, 128).to(CUDA, torch.bfloat16)
    layers = []
    for backend in (BACKENDS[name], BACKENDS["emulated_nvfp4"]):
        layer = backend.replacements(amax)(linear)
        for part, tensor in backend.pack(linear.weight, True).items():
            layer.wire_targets()[part].copy_(tensor)
        layer.finish_loading()
        layers.append(layer)
    return layers[0], layers[1]


@pytest.mark.parametrize("name", [on_gpu(name) for name in HARDWARE])
@pytest.mark.parametrize("rows", [48, 7])
@torch.no_grad()
def test_kernels_equal_the_emulation(name, rows):
    """Codes and scales are equal. The results differ by float32 sums in another order and by
    rounding to bfloat16, which happens twice where the bias is added separately.
    """
    layer, emulated = layers_on_gpu(name)
    x = torch.randn(rows, 256, device=CUDA, dtype=torch.bfloat16)
    assert_equal_up_to_rounding(layer(x), emulated(x))


def assert_equal_up_to_rounding(actual: torch.Tensor, expected: torch.Tensor) -> None:
    difference, expected = (actual.double() - expected.double()).abs(), expected.double().abs()
    assert (difference <= 2.0**-7 * expected + 2.0**-7 * expected.mean()).all()


@pytest.mark.parametrize("name", [on_gpu(name) for name in HARDWARE])
@torch.no_grad()
def test_passes_by_the_amax_of_the_one_before_equal_the_emulation(name):
    """The second pass is packed by one kernel, with the amax that the first one recorded."""
    models = [nn.Sequential(layer) for layer in layers_on_gpu(name, "previous_pass")]
    counters = [PassCounter(model) for model in models]
    for scale in (1.0, 3.0, 0.5, 40.0):  # the last one outgrows the headroom of 8
        x = torch.randn(48, 256, device=CUDA, dtype=torch.bfloat16) * scale
        assert_equal_up_to_rounding(*(model(x) for model in models))
        recorded = [int(model[0].history.current.max()) for model in models]
        assert recorded[0] == recorded[1] == int(x.abs().max().float().view(torch.int32))
    assert [counter.end() for counter in counters] == [(1, 3), (1, 3)]


@pytest.mark.parametrize("name", [on_gpu(name) for name in HARDWARE])
@torch.no_grad()
def test_captured_graph_uses_newly_loaded_weights(name):
    """A captured graph uses newly loaded weights. It packs the content of its input at replay, and
    does not reuse the input that was packed during warm-up.
    """
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
    layer.finish_loading()
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, layer(x))


@pytest.mark.parametrize("name", [on_gpu(name) for name in HARDWARE])
@torch.no_grad()
def test_rows_do_not_depend_on_other_rows_on_the_gpu(name):
    linear = nn.Linear(256, 128).to(CUDA, torch.bfloat16)
    layer = BACKENDS[name].replacements("power_of_two")(linear)
    for part, tensor in BACKENDS[name].pack(linear.weight, True).items():
        layer.wire_targets()[part].copy_(tensor)
    layer.finish_loading()
    x = torch.randn(32, 256, device=CUDA, dtype=torch.bfloat16)
    changed = x.clone()
    changed[16:] *= 3
    assert torch.equal(layer(x)[:16], layer(changed)[:16])
