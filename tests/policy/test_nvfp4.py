"""The NVFP4 format: golden vectors of TransformerEngine's arithmetic, a brute-force reference, and
property tests.
"""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from policy.precision import nvfp4
from policy.precision.emulated import Workspace
from policy.precision.nvfp4 import Packed, block_amax, dequantize, quantize, quantize_activation

RAMP = [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, -6]
# zero, or large enough that the unit of a block is a normal float32; with smaller values the
# arithmetic of any format loses bits
ELEMENTS = st.floats(-8, 8, width=32).map(lambda value: value if abs(value) >= 2.0**-90 else 0.0)
MATRIX = arrays(np.float32, (3, 48), elements=ELEMENTS)
ANY_MATRIX = arrays(
    np.float32, (2, 32), elements=st.floats(allow_nan=False, allow_infinity=False, width=32)
)


def digest(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


def test_golden_codes_of_a_manual_example():
    packed = quantize(torch.tensor([RAMP + [448 * v for v in RAMP]]))
    assert packed.amax == 2688
    assert packed.scales.tolist() == [[56, 126]]
    assert (
        packed.codes.numpy().tobytes().hex(" ")
        == "00 21 22 43 44 65 66 f7 " + "00 21 22 43 44 65 66 f7"
    )


def test_scale_uses_the_order_of_multiplication_of_transformer_engine():
    """The result is 352 with the rule of TransformerEngine since 2.14.1, and 320 with the earlier
    rule.
    """
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 16] = 1.09375, 0.8203125
    assert quantize(weight).scales.view(torch.float8_e4m3fn).float()[0, 1] == 352


def test_encoding_scale_is_rounded_once():
    """The encoding scale is 2688 / amax, rounded once by IEEE division. For a third of all amax
    values, 1 / amax times 2688 gives another number.
    """
    for amax in torch.linspace(1, 2, 257)[1:]:
        expected = np.float32(2688) / np.float32(amax.item())
        assert nvfp4.encoding_scale(amax).item() == expected


def test_golden_digests_of_bfloat16_weights():
    i = torch.arange(2048)
    packed = quantize((((i * 2654435761) % 4093 - 2046) / 1024).to(torch.bfloat16).view(32, 64))
    assert digest(packed.codes) == "a84a5cf3bccc0b4d"
    assert digest(packed.scales) == "38f752adbebaa2dd"


def test_packed_size_is_four_and_a_half_bits_per_weight():
    packed = quantize(torch.randn(32, 64))
    assert sum(t.numel() * t.element_size() for t in vars(packed).values()) == 32 * 64 * 4.5 / 8 + 4


def test_e2m1_rounding_against_brute_force():
    """Values are rounded to the nearest of the 15 values, and ties to the even code. The test uses
    a grid of 1/64, which includes all ties, and its float32 neighbors.
    """
    grid = torch.arange(-7 * 64, 7 * 64 + 1) / 64.0
    inputs = torch.cat(
        [grid, torch.nextafter(grid, torch.tensor(9.0)), torch.nextafter(grid, torch.tensor(-9.0))]
    )
    distance = (inputs.double().abs().unsqueeze(-1) - torch.tensor(nvfp4.VALUES).double()).abs()
    # 1e-12 breaks ties and is smaller than a float32 step
    code = (distance + torch.tensor([0, 1e-12] * 4)).argmin(-1)
    expected = torch.tensor(nvfp4.VALUES)[code] * inputs.sign()
    # + 0 makes -0 and 0 equal
    assert torch.equal(nvfp4.round_e2m1_(inputs.clone()) + 0.0, expected + 0.0)
    inside = inputs[inputs.abs() < 7]
    assert torch.equal(
        nvfp4.round_e2m1_(inside.clone(), saturate=False) + 0.0, expected[inputs.abs() < 7] + 0.0
    )


def test_e4m3_rounding_against_torch():
    """The arithmetic rounding to 3 mantissa bits equals torch's cast, for every pair of neighboring
    E4M3 values and for points between them.
    """
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    steps = torch.linspace(0, 1, 17)
    points = (values[:-1, None] + (values[1:] - values[:-1])[:, None] * steps).flatten()
    points = torch.cat([points, torch.nextafter(points, torch.tensor(1e9)).clamp(max=448)])
    assert torch.equal(
        nvfp4.round_to_mantissa_(points.clone(), bits=3, lowest=-6),
        points.to(torch.float8_e4m3fn).float(),
    )


def test_every_code_decodes():
    codes = torch.tensor([[16 * (2 * j + 1) + 2 * j for j in range(8)]], dtype=torch.uint8)
    # sf = 1, so the unit is 1
    packed = Packed(codes, torch.tensor([[0x38]], dtype=torch.uint8), torch.tensor(2688.0))
    assert dequantize(packed).tolist() == [[*nvfp4.VALUES, *(-v for v in nvfp4.VALUES)]]


def blocks_and_units(weight, packed):
    """Return the blocks of the input, the decoded blocks, and the unit sf * amax / 2688 of each
    block, in float64.
    """
    unit = packed.scales.view(torch.float8_e4m3fn).double() * packed.amax.double() / 2688
    return (
        weight.double().view(*unit.shape, 16),
        dequantize(packed).double().view(*unit.shape, 16),
        unit,
    )


@given(MATRIX)
def test_error_is_at_most_one_unit(array):
    """Steps are at most 2 units, so rounding errs by at most 1 unit. Saturation loses at most 6/16
    of a unit, because a normal sf is rounded down by at most 1/16. 1e-5 covers the float32
    arithmetic.
    """
    weight = torch.from_numpy(array)
    packed = quantize(weight)
    blocks, decoded, unit = blocks_and_units(weight, packed)
    normal = (packed.scales >= 8) | (block_amax(weight) == 0)
    assert ((blocks - decoded).abs().amax(-1) <= unit * (1 + 1e-5))[normal].all()


@given(MATRIX)
def test_round_trip_is_idempotent(array):
    """Packing the decoded weight with the same amax decodes to the same weight. Blocks with a
    subnormal sf are excluded, because they do not reach the value 6.
    """
    packed = quantize(torch.from_numpy(array))
    once = dequantize(packed)
    twice = dequantize(quantize(once, amax=packed.amax))
    normal = (packed.scales >= 8) | (packed.scales == 0)
    assert torch.equal(twice.view(3, 3, 16)[normal], once.view(3, 3, 16)[normal])


@given(MATRIX)
@example(np.zeros((3, 48), np.float32))
def test_scale_search_is_never_worse(array):
    """The squared error of every block is at most that without the search. 1e-5 covers the
    difference between float32 and float64 sums.
    """
    weight = torch.from_numpy(array)
    plain, searched = quantize(weight), quantize(weight, search=True)
    blocks, decoded, _ = blocks_and_units(weight, plain)
    _, better, _ = blocks_and_units(weight, searched)
    before, after = (blocks - decoded).square().sum(-1), (blocks - better).square().sum(-1)
    assert (after <= before * (1 + 1e-5) + 1e-12).all()
    assert not (searched.scales == 127).any()


def test_scale_search_reaches_the_published_gain():
    """On Gaussian weights the search reduces the relative error from 0.095 to 0.081-0.082. With
    4096 blocks, the mean is accurate to 1 %.
    """
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    errors = [
        ((dequantize(quantize(weight, search=s)) - weight).norm() / weight.norm()).item()
        for s in (False, True)
    ]
    assert errors[0] == pytest.approx(0.0953, rel=0.02)
    assert errors[1] == pytest.approx(0.0815, rel=0.02)


def test_zero_block_and_underflowing_block_decode_to_zero():
    """A block of zeros decodes to zeros. A block below amax / 2^19 has sf 0, saturated codes, and
    decodes to 0.
    """
    weight = torch.zeros(1, 48)
    weight[0, 0], weight[0, 20] = 1.0, -(2.0**-19)
    packed = quantize(weight)
    assert packed.scales.tolist() == [[126, 0, 0]]
    assert packed.codes[0, 8:16].tolist() == [0, 0, 0xF, 0, 0, 0, 0, 0]
    assert packed.codes[0, 16:].eq(0).all()
    assert dequantize(packed)[0].tolist() == [1.0] + [0.0] * 47


def test_zero_weight_decodes_to_zero():
    packed = quantize(torch.zeros(2, 32), search=True)
    assert packed.amax == 0 and not packed.codes.any() and not dequantize(packed).any()


def test_given_amax_is_used():
    weight = torch.tensor([RAMP])
    packed = quantize(weight, amax=torch.tensor(12.0))
    assert packed.amax == 12 and packed.scales.tolist() == [[0x76]]  # sf = 224, half of 448
    assert dequantize(packed)[0, -1] == -6
    assert dequantize(quantize(weight, amax=torch.tensor(3.0)))[0, -1] == -3  # saturates


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_weight_is_refused(bad):
    weight = torch.ones(2, 32)
    weight[1, 7] = bad
    with pytest.raises(ValueError, match="cannot pack a weight with amax (nan|inf)"):
        quantize(weight)


@pytest.mark.parametrize("shape", [(4, 20), (16,), (2, 2, 16)])
def test_unsupported_shape_is_refused(shape):
    with pytest.raises(ValueError, match="K a multiple of 16"):
        quantize(torch.ones(shape))


@pytest.mark.parametrize(
    ("amax", "expected"),
    [(0.0, 0.0), (1.0, 1.0), (1.0000001, 2.0), (0.75, 1.0), (3e-39, 2.0**-127), (5.0, 8.0)],
)
def test_power_of_two_above(amax, expected):
    assert nvfp4.power_of_two_above(torch.tensor(amax)).item() == expected


def test_power_of_two_above_a_non_finite_value_is_nan():
    assert nvfp4.power_of_two_above(torch.tensor([float("nan"), float("inf")])).isnan().all()


@given(ANY_MATRIX)
@example(np.zeros((2, 32), np.float32))
@example(np.full((2, 32), 3e-45, np.float32))
@example(np.full((2, 32), 3.4e38, np.float32))
@example(np.float32([[1.0] * 32, [1.4 * 2**-9 / 448] * 32]))  # a subnormal scale, rounded down
def test_fast_activation_quantizer_equals_the_plain_one(array):
    """Both are equal bit for bit over the whole range of float32."""
    x = torch.from_numpy(array)
    fast, plain = Workspace().quantized(x), quantize_activation(x)
    assert torch.equal(fast[0].view(torch.int32), plain[0].view(torch.int32))
    assert torch.equal(fast[1], plain[1])


@given(MATRIX)
def test_activations_are_quantized_like_weights_with_a_rounded_amax(array):
    """The operand of an activation is q * sf by the rule for weights, with amax rounded up to a
    power of two.
    """
    x = torch.from_numpy(array)
    operand, amax = quantize_activation(x)
    largest = x.abs().max()
    assert amax == largest == 0 or (largest <= amax < 2 * largest and amax.frexp().mantissa == 0.5)
    packed = quantize(x, amax=amax)
    unpacked = nvfp4.decoded_operand(
        packed.codes, packed.scales, nvfp4.nibble_values(), nvfp4.scale_values()
    )
    assert torch.equal(operand + 0.0, unpacked + 0.0)


@given(MATRIX, st.floats(0.0, 1.0))
def test_smaller_rows_do_not_change_other_rows(array, share):
    """An image in the batch whose amax is not above the same power of two changes no bit of the
    others.
    """
    x = torch.from_numpy(array)
    alone, amax = quantize_activation(x)
    together, _ = quantize_activation(torch.cat([x, torch.full((1, 48), share) * amax]))
    assert torch.equal(together[:3], alone)


def test_larger_rows_do_not_change_other_rows_with_normal_scales():
    """With 5.7 times the amax, all scales change by the same power of two, 8, and the decoded
    values stay equal.
    """
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    alone, amax = quantize_activation(x)
    together, larger_amax = quantize_activation(
        torch.cat([x, torch.full((1, 64), 5.7 * amax.item())])
    )
    assert larger_amax == 8 * amax
    assert torch.equal(together[:4] * larger_amax, alone * amax)


def test_non_finite_activations_stay_visible():
    x = torch.ones(2, 32)
    x[0, 3] = float("nan")
    assert Workspace().quantized(x)[0].isnan().any() and Workspace().quantized(x)[1].isnan()
    x[0, 3] = float("inf")
    assert Workspace().quantized(x)[1].isnan()
