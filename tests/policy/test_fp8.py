"""FP8 layers are compared with their dequantized operands. Rows must be independent of
each other.
"""

import pytest
import torch
from torch import nn

from policy.precision.backends import BACKENDS
from policy.precision.fp8 import Activations, FP8Linear, quantize_rows, row_scales
from policy.precision.nvfp4 import frozen_amax

pytestmark = pytest.mark.gpu
FP8 = BACKENDS["fp8"]
REFUSALS = {name: FP8.unavailable_reason(torch.device(name)) for name in ("cpu", "cuda")}
ON_DEVICES = pytest.mark.parametrize(
    "device",
    [
        pytest.param(name, marks=pytest.mark.skipif(refusal is not None, reason=str(refusal)))
        for name, refusal in REFUSALS.items()
    ],
)


def fp8_layer(linear: nn.Linear) -> FP8Linear:
    layer = FP8Linear(linear, Activations())
    for name, tensor in FP8.pack(linear.weight, True).items():
        layer.wire_targets()[name].copy_(tensor)
    return layer


def random_linear(rows: int = 48, columns: int = 64, bias: bool = True) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(columns, rows, bias=bias)


def dequantized(x: torch.Tensor) -> torch.Tensor:
    scales = row_scales(x)
    return quantize_rows(x, scales).double() * scales.double()


@torch.no_grad()
@ON_DEVICES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 64), (2, 5, 64), (64,)])
def test_forward_is_the_product_of_dequantized_operands(device, bias, shape):
    """The result is compared with float64. Sums of K = 64 exact products in float32 have an error
    of at most (K + 2) 2^-24 times the sum of their absolute values. Then the product, the bias and
    the result are rounded to bfloat16, each by at most 2^-8 of itself. Hopper's tensor cores align
    32 products and the previous sum to the largest of them and cut each off after 13 bits: at most
    twice 33 errors of 2^-13 of the largest.
    """
    linear = random_linear(bias=bias).to(device)
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).to(device)
    rows = dequantized(x.reshape(-1, 64))
    weight = FP8.decode(FP8.pack(linear.weight, True)).double()
    product = rows @ weight.t()
    offset = linear.bias.double() if bias else torch.zeros(48, device=device).double()
    expected = product + offset
    rounding = 2.0**-8 * (product.abs() + offset.abs() + expected.abs())
    if device == "cpu":
        sums = 66 * 2.0**-24 * (rows.abs() @ weight.abs().t())
    else:
        products = rows[:, None] * weight
        largest = torch.maximum(products.abs().amax(-1), products.cumsum(-1).abs().amax(-1))
        sums = 66 * 2.0**-13 * largest
    bound = sums + rounding
    y = fp8_layer(linear)(x)
    assert y.shape == (*shape[:-1], 48) and y.dtype == torch.float32
    assert ((y.reshape(-1, 48).double() - expected).abs() <= bound).all()


@torch.no_grad()
@ON_DEVICES
def test_quantization_error_is_that_of_the_format(device):
    """For Gaussian operands, E4M3 rounds a value by about 2^-4 / sqrt(12) / sqrt(2) of itself on
    average. Both operands are rounded, so the relative error of the result is 0.037.
    """
    generator = torch.Generator().manual_seed(2)
    linear = random_linear(128, 256, bias=False)
    linear.weight.copy_(torch.randn(128, 256, generator=generator))
    linear.to(device)
    x = torch.randn(256, 256, generator=generator).to(device)
    unquantized = linear(x)
    assert (
        (fp8_layer(linear)(x) - unquantized).norm() / unquantized.norm()
    ).item() == pytest.approx(0.037, abs=0.002)


def test_codes_and_scales_of_rows():
    weight = torch.tensor([[448.0, 1.0, -2.0, 0.0] * 4, [0.0] * 16, [-896.0, 2.25, 0, 0] * 4])
    packed = FP8.pack(weight, False)
    assert packed["codes"].dtype == torch.uint8 and packed["codes"].shape == (3, 16)
    assert packed["scales"].tolist() == [1.0, torch.finfo(torch.float32).tiny, 2.0]
    assert FP8.decode(packed)[:, :4].tolist() == [[448, 1, -2, 0], [0, 0, 0, 0], [-896, 2.25, 0, 0]]
    assert FP8.decode(packed)[2, 1] == 2.25  # 1.125 is an E4M3 value
    assert (
        FP8.changed(FP8.pack(weight + torch.tensor([0.0, 1.0, 0.0, 0.0] * 4), False), packed) == 12
    )
    # values below the smallest scale become zero, not garbage
    small = FP8.pack(torch.full((1, 16), 1e-44), False)
    assert not FP8.decode(small).any()


def test_frozen_range_keeps_codes_when_one_weight_grows():
    """When the largest weight of a row grows, every code of the row changes, unless the range was
    frozen at the first weight.
    """
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    grown = weight.clone()
    grown[:, 0] = 1.2 * weight.abs().amax(-1)
    for frozen, unchanged in ((False, False), (True, True)):
        before, after = (
            FP8.pack(w, False, frozen_amax(FP8.amax(weight), FP8.amax(w)) if frozen else None)
            for w in (weight, grown)
        )
        assert torch.equal(before["codes"][:, 1:], after["codes"][:, 1:]) == unchanged
    assert torch.equal(after["scales"], 2 * weight.abs().amax(-1) / 448)
    # a weight beyond the frozen range: the range is doubled until the weight fits
    outgrown = FP8.pack(weight * 5, False, frozen_amax(FP8.amax(weight), FP8.amax(weight * 5)))
    assert torch.equal(outgrown["scales"], 8 * weight.abs().amax(-1) / 448)


@torch.no_grad()
@ON_DEVICES
def test_row_does_not_depend_on_other_rows(device):
    """The codes and the scale of a row do not depend on other rows at all. Its result depends on
    them only by the order of float32 sums, which changes it by at most one bfloat16 step.
    """
    layer = fp8_layer(random_linear().to(device))
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(4)).to(device)
    with_large_rows = torch.cat([x, 1000 * x])
    alone, together = layer.activations.quantized(x), layer.activations.quantized(with_large_rows)
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a.float(), b[:6].float())
    alone, together = layer(x), layer(with_large_rows)[:6]
    assert ((alone - together).abs() <= 2.0**-7 * alone.abs()).all()


@torch.no_grad()
@ON_DEVICES
def test_non_finite_values_stay_visible(device):
    layer = fp8_layer(random_linear().to(device))
    x = torch.ones(3, 64, device=device)
    x[1, 5] = float("nan")
    x[2, 5] = float("inf")
    y = layer(x)
    assert y[0].isfinite().all() and y[1].isnan().all() and y[2].isnan().all()
    weight = torch.ones(16, 16)
    weight[3, 3] = float("inf")
    with pytest.raises(ValueError, match="FP8 cannot pack a weight with amax inf"):
        FP8.pack(weight, True)


@ON_DEVICES
def test_cast_does_not_change_the_scales(device):
    layer = fp8_layer(random_linear().to(device))
    before = layer.scales.clone()
    assert torch.equal(layer.bfloat16().scales, before)
    assert layer.bias is not None
    assert layer.bias.dtype == torch.bfloat16
    y = layer(torch.ones(2, 64, dtype=torch.bfloat16, device=device))
    assert y.dtype == torch.bfloat16


def test_kernel_supports_multiples_of_16():
    assert FP8.unsupported_reason(48, 64) is None
    assert FP8.unsupported_reason(48, 60) == "K = 60 is not a multiple of 16"
    assert FP8.unsupported_reason(24, 64) == "N = 24 is not a multiple of 16"
