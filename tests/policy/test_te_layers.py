"""The layer of ``te_nvfp4`` in the installed TransformerEngine, without a GPU.

TransformerEngine's own code decides which buffers its kernels get. It runs here up to the two
kernels of a layer, the quantizer of activations and the product. Python functions replace these and
decode what they get by its documented layout. Skipped where TransformerEngine is not installed;
docs/precision.md says how to install it.
"""

import types

import pytest
import torch
from torch import nn

from policy.precision.backends import BACKENDS
from policy.precision.nvfp4 import BLOCK, Packed, dequantize, pack_activation
from policy.precision.te_nvfp4 import EngineLinear, engine_lacks, import_engine, nvfp4_recipe

try:
    engine, recipes = import_engine()
except ImportError as error:
    pytest.skip(f"TransformerEngine cannot be imported: {error}", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("with a GPU, test_nvfp4_hardware.py runs the kernels", allow_module_level=True)

B200 = types.SimpleNamespace(major=10, minor=0, multi_processor_count=148, name="NVIDIA B200")


def rows_in_order(scales: torch.Tensor) -> torch.Tensor:
    """Return block scales in cuBLAS's order [R, C] as rows: the inverse of ``layer.swizzled``."""
    tiles = scales.view(len(scales) // 128, scales.shape[1] // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(scales.shape)


def decoded(operand) -> torch.Tensor:
    """Return the float32 values [rows, K] of an NVFP4Tensor, by its own metadata."""
    parts = operand.get_metadata()
    assert parts["columnwise_data"] is None and not parts["row_scaled_nvfp4"]
    codes, scales = parts["rowwise_data"], parts["rowwise_scale_inv"]
    if parts["with_gemm_swizzled_scales"]:
        scales = rows_in_order(scales)
    scales = scales[: len(codes), : codes.shape[1] * 2 // BLOCK]
    return dequantize(Packed(codes, scales, parts["amax_rowwise"].view(())))


class Kernels:
    """Stand-ins for the two kernels, with a record of what they were asked for."""

    def __init__(self) -> None:
        self.quantized: list[tuple[torch.Tensor, object]] = []
        self.products = 0

    def quantize(self, x, quantizer, *rest):
        self.quantized.append((x, quantizer))
        packed = pack_activation(x, exact=True)
        scales = torch.zeros(quantizer.get_scale_shape(x.shape, False), dtype=torch.uint8)
        scales[: len(x), : x.shape[1] // BLOCK] = packed.scales
        return engine.NVFP4Tensor(
            tuple(x.shape),
            x.dtype,
            rowwise_data=packed.codes,
            rowwise_scale_inv=scales,
            columnwise_data=None,
            columnwise_scale_inv=None,
            amax_rowwise=packed.amax.view(1),
            amax_columnwise=None,
            fp4_dtype=engine.DType.kFloat4E2M1,
            quantizer=quantizer,
            with_gemm_swizzled_scales=False,
        )

    def generic_gemm(
        self, a, transposed_a, b, transposed_b, out, quantizer, dtype, bias, *rest, **kw
    ):
        """cuBLAS is column-major: "a transposed" is weight [N, K], b is activations [M, K]."""
        assert (transposed_a, transposed_b, out, quantizer) == (True, False, None, None)
        assert dtype == engine.DType.kBFloat16 and (kw["alpha"], kw["beta"]) == (1.0, 0.0)
        self.products += 1
        y = decoded(b) @ decoded(a).t()
        if bias is not None:
            y += bias.float()
        return y.to(torch.bfloat16), None, None, None


@pytest.fixture
def kernels(monkeypatch) -> Kernels:
    """The stand-ins in TransformerEngine, and a torch that reports a B200."""
    compiled = pytest.importorskip("transformer_engine_torch")
    stand_ins = Kernels()
    monkeypatch.setattr(compiled, "quantize", stand_ins.quantize)
    monkeypatch.setattr(compiled, "generic_gemm", stand_ins.generic_gemm)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: B200)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name in ("range_push", "range_pop"):
        monkeypatch.setattr(torch.cuda.nvtx, name, lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    return stand_ins


def test_the_installed_version_has_what_is_used(kernels):
    assert engine_lacks(engine, recipes) == []
    assert BACKENDS["te_nvfp4"].unavailable_reason(torch.device("cuda")) is None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(256, 64), (48, 96), (2560, 320)])
def test_product_gets_the_published_weight(kernels, shape, bias):
    """The weight reaches the product with its bytes, and the result is the emulated layer's.

    Each rounds to bfloat16 (2^-8 of the result), TransformerEngine the bias as well. Their float32
    sums run in other orders: 2^-24 per term, of products that packing at most doubles.
    """
    n, k = shape
    torch.manual_seed(n)
    linear = nn.Linear(k, n, bias=bias)
    layer = EngineLinear(linear, engine, nvfp4_recipe(recipes))
    emulated = BACKENDS["emulated_nvfp4"].replacements("exact")(linear)
    packed = BACKENDS["te_nvfp4"].pack(linear.weight.detach(), True)
    for each in (layer, emulated):
        for part, tensor in packed.items():
            each.wire_targets()[part].copy_(tensor)
        each.finish_loading()
    x = torch.randn(3, 5, k).to(torch.bfloat16)
    with torch.no_grad():
        y, expected = layer(x), emulated(x).float()
    assert kernels.products == 1 and y.shape == (3, 5, n) and y.dtype == torch.bfloat16
    ((rows, quantizer),) = kernels.quantized
    assert rows.shape == (32, k) and torch.equal(rows[:15], x.view(-1, k))
    assert quantizer.rowwise_usage and not quantizer.columnwise_usage
    assert not (quantizer.with_rht or quantizer.stochastic_rounding or quantizer.row_scaled_nvfp4)
    products = x.float().abs() @ linear.weight.detach().abs().t()
    bound = 2**-7 * expected.abs() + 2 * k * 2**-24 * 2 * products
    if bias:
        bound += 2**-8 * linear.bias.detach().abs()
    assert ((y.float() - expected).abs() <= bound).all()


def test_loaded_weights_are_used_in_place(kernels):
    """A version that is loaded later is in the next product: the layer holds no copy."""
    linear = nn.Linear(64, 32, bias=False)
    layer = EngineLinear(linear, engine, nvfp4_recipe(recipes))
    x = torch.eye(64, dtype=torch.bfloat16)
    for seed in range(2):
        weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
        packed = BACKENDS["te_nvfp4"].pack(weight, True)
        for part, tensor in packed.items():
            layer.wire_targets()[part].copy_(tensor)
        layer.finish_loading()
        assert torch.equal(layer(x), dequantize(Packed(**packed)).t().to(torch.bfloat16))
