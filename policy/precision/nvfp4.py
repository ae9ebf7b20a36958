"""NVFP4: E2M1 values in blocks of 16 along K, an E4M3 scale per block, an FP32 amax per tensor.

The arithmetic matches NVIDIA's TransformerEngine from 2.14.1 on bit for bit (recipe
``NVFP4BlockScaling``, 1x16 blocks, no random Hadamard transform, no stochastic rounding). All of it
is in float32:

    S_enc = min(2688 / amax, FLT_MAX), or 1 where amax is 0
            2688 = 448 * 6, the largest E4M3 times the largest E2M1
    sf    = e4m3(min(block_amax * (S_enc * fp32(1/6)), 448))
            rounded to nearest even; may be 0
    inv   = min(1 / (sf * (1 / S_enc)), FLT_MAX)
    q     = e2m1(x * inv)
            rounded to nearest even, saturating at 6
    value = q * ((sf * amax) * (1 / 2688))

A matrix product uses only U = q * sf: y = alpha Ux Uw^T with alpha = amax_x amax_w / 2688^2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from policy.precision import kernels

BLOCK = 16
E4M3_MAX = 448.0
E2M1_MAX = 6.0
SPAN = E4M3_MAX * E2M1_MAX
FLOAT_MAX = torch.finfo(torch.float32).max
# rounded to float32 before use, like the constants of the kernels
SIXTH = torch.tensor(1.0 / 6.0, dtype=torch.float32).item()
SPAN_INVERSE = torch.tensor(1.0 / SPAN, dtype=torch.float32).item()
E4M3_SMALLEST_NORMAL = 2.0**-6
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
HEADROOM = 8.0
"""Factor on the amax of the previous pass: by how much activations may grow between two passes."""
EXPECTED = 2.0**12
"""Amax for an input that was all zero in the previous pass."""
LARGEST_POWER = 2.0**127
SEARCH_OFFSETS = range(-4, 8)
"""Candidates of the scale search: offsets of E4M3 codes from that of the plain scale.

On Gaussian and on heavy-tailed weights, a search over all codes only chose offsets within -3..7.
"""
ROWS = 4096
"""Rows searched at a time: the error of a candidate needs as much memory as the FP32 rows."""


@dataclass(frozen=True)
class Packed:
    """A weight [N, K] packed in 4.5 bits per element, plus four bytes.

    ``codes`` uint8 [N, K / 2], even element in the low nibble; ``scales`` uint8 [N, K / 16], the
    bits of E4M3; ``amax`` float32 [].
    """

    codes: Tensor
    scales: Tensor
    amax: Tensor


def round_to_mantissa_(v: Tensor, bits: int, lowest: int, scratch: Tensor | None = None) -> Tensor:
    """Round float32 v in place, half to even, to ``bits`` mantissa bits.

    ``lowest`` is the smallest normal exponent of the target format. Adding and subtracting M = 1.5
    * 2^(23 - bits) * p, with p the power of two below |v| but at least 2^lowest, rounds to
    multiples of p / 2^bits, in four passes without branches or tables.
    """
    power = torch.bitwise_and(v.view(torch.int32), 0x7F800000, out=scratch).view(torch.float32)
    power.clamp_(min=2.0**lowest)
    # 1.5 rather than 1: M + v then stays within M's binade for v of either sign, so that the last
    # bit of the sum always has the same weight. M is exact, however it is computed
    factor = 1.5 * 2.0 ** (23 - bits)
    return v.add_(power, alpha=factor).sub_(power, alpha=factor)


def round_e2m1_(v: Tensor, scratch: Tensor | None = None, saturate: bool = True) -> Tensor:
    """Round float32 v to E2M1 in place, half to even; requires |v| < 7 unless ``saturate``."""
    clamped = v.clamp_(-E2M1_MAX, E2M1_MAX) if saturate else v
    return round_to_mantissa_(clamped, bits=1, lowest=0, scratch=scratch)


def block_amax(x: Tensor) -> Tensor:
    """Return max|x| of each block of 16 elements: [..., K] -> [..., K / 16]."""
    # repeated halving is faster than torch's reduction over such a short dimension
    largest = x.abs().unflatten(-1, (-1, BLOCK))
    for half in (8, 4, 2, 1):
        largest = torch.maximum(largest[..., :half], largest[..., half:])
    return largest.squeeze(-1)


def encoding_scale(amax: Tensor) -> Tensor:
    """Return S_enc, float32 [], for the amax of a tensor."""
    # not SPAN / amax, which torch computes as SPAN times the reciprocal, with two roundings
    scale = torch.div(torch.full_like(amax, SPAN), amax).clamp(max=FLOAT_MAX)
    return torch.where((amax == 0) | (scale == 0), torch.ones_like(scale), scale)


def block_scales(largest: Tensor, s_enc: Tensor) -> Tensor:
    """Return the plain E4M3 scales for these block amax values: float8_e4m3fn, same shape."""
    return (largest * (s_enc * SIXTH)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)


def inverse_scales(scales: Tensor, s_enc: Tensor) -> Tensor:
    """Return the factors (inv) of elements before rounding; ``scales`` are float32."""
    return torch.reciprocal(scales * torch.reciprocal(s_enc)).clamp(max=FLOAT_MAX)


def quantize(weight: Tensor, search: bool = False, amax: Tensor | None = None) -> Packed:
    """Pack a weight [N, K] of any float dtype, K a multiple of 16.

    ``search`` selects each block's scale among 12 candidates around the plain one by squared
    error (never worse than plain). ``amax`` replaces max|W|, for a scale that is frozen over a run;
    larger values saturate. Uses kernels if they are available, else many torch operations; where
    the errors of two scales are equal but for rounding, the two may select different ones. Raises
    ValueError for a bad shape or a non-finite weight or amax.
    """
    if weight.ndim != 2 or weight.shape[1] % BLOCK:
        raise ValueError(
            f"NVFP4 packs [N, K] with K a multiple of {BLOCK}, got {list(weight.shape)}"
        )
    weight = weight.detach()
    if weight.numel() and kernels.missing(weight.device) is None:
        amax = _checked_amax(kernels.tensor_amax(weight), amax)
        offsets = SEARCH_OFFSETS if search else range(0)
        return Packed(*kernels.nvfp4_pack_weight(weight, amax, offsets), amax.clone())
    values = weight.float()
    largest = block_amax(values)
    own = largest.max() if largest.numel() else values.new_zeros(())
    return pack(values, largest, _checked_amax(own, amax), search)


def _checked_amax(own: Tensor, amax: Tensor | None) -> Tensor:
    """Return the amax to pack with. Raises ValueError if it, or that of the weight, is not finite.

    The host waits for both.
    """
    # before the check, because a given amax may be non-finite as well
    amax = own if amax is None else amax.detach().to(own)
    if not (math.isfinite(own.item()) and math.isfinite(amax.item())):
        raise ValueError(
            "NVFP4 cannot pack a weight with amax"
            f" {own.item() if amax is own else (own.item(), amax.item())}"
        )
    return amax


def pack(values: Tensor, largest: Tensor, amax: Tensor, search: bool = False) -> Packed:
    """Pack ``values`` float32 [N, K] with block amax ``largest`` and tensor amax ``amax``."""
    s_enc = encoding_scale(amax)
    scales = block_scales(largest, s_enc)
    if search:
        scales = search_scales(values, scales, s_enc, amax)
    v = scaled(values, scales, s_enc)
    negative = v < 0
    return Packed(encode(round_e2m1_(v), negative), scales.view(torch.uint8), amax.clone())


def frozen_amax(base: Tensor, now: Tensor) -> Tensor:
    """Return the amax with which a weight is packed throughout a run, with headroom for updates.

    It is twice the amax of the run's first weight, doubled until it covers ``now``. ``base`` and
    ``now`` are largest absolute values, float32 of the same shape. E4M3 scales are relative to
    amax, so one binade of headroom affects only the smallest scales, and in return a small update
    does not change the grid of all other blocks. The result depends on the two weights and not on
    the history, so that a resumed run packs identically.
    """
    return torch.where(base > 0, base * power_of_two_above(now / base).clamp(min=2.0), now)


def scaled(values: Tensor, scales: Tensor, s_enc: Tensor) -> Tensor:
    """Return x * inv [..., K], with one inverse per block."""
    inverse = inverse_scales(scales.float(), s_enc).unsqueeze(-1)
    return (values.unflatten(-1, (-1, BLOCK)) * inverse).flatten(-2)


def search_scales(values: Tensor, plain: Tensor, s_enc: Tensor, amax: Tensor) -> Tensor:
    """Return the scales of least squared error per block: float8_e4m3fn [N, K / 16].

    Ties keep the plain scale.
    """
    chosen = plain.view(torch.uint8).clone()
    for start in range(0, len(values), ROWS):
        part, codes = values[start : start + ROWS], chosen[start : start + ROWS]
        base = codes.to(torch.int16)
        least = _block_error(part, base, s_enc, amax)
        # fixed order, and only a strictly smaller error wins: the choice is reproducible
        for offset in SEARCH_OFFSETS:
            candidate = (base + offset).clamp_(0, 126)  # 126 is 448, 127 is NaN
            error = _block_error(part, candidate, s_enc, amax)
            better = error < least
            codes[better] = candidate[better].to(torch.uint8)
            least = torch.where(better, error, least)
    return chosen.view(torch.float8_e4m3fn)


def _block_error(values: Tensor, codes: Tensor, s_enc: Tensor, amax: Tensor) -> Tensor:
    """Return the squared error of each block with these E4M3 scale codes: [N, K / 16]."""
    scales = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    q = round_e2m1_(scaled(values, scales, s_enc)).unflatten(-1, (-1, BLOCK))
    unit = (scales.float() * amax * SPAN_INVERSE).unsqueeze(-1)
    return block_sum((q * unit).sub_(values.unflatten(-1, (-1, BLOCK))).square_())


def block_sum(squares: Tensor) -> Tensor:
    """Return the sums of blocks [..., 16]; on a GPU in the order of the kernel."""
    return squares.sum(-1) if squares.device.type == "cpu" else pair_sums(squares)


def pair_sums(squares: Tensor) -> Tensor:
    """Return the sums of blocks [..., 16], of neighbors first."""
    while squares.shape[-1] > 1:
        squares = squares[..., 0::2] + squares[..., 1::2]
    return squares.squeeze(-1)


def encode(q: Tensor, negative: Tensor) -> Tensor:
    """Encode E2M1 values [N, K], with the signs before rounding, as nibbles: uint8 [N, K / 2]."""
    magnitude = q.abs()
    # exponent and top mantissa bit: correct for magnitudes from 1.0 on
    above = (magnitude.view(torch.int32) >> 22) - 252
    code = torch.maximum(above, (magnitude * 2).to(torch.int32).clamp_(max=2)).to(torch.uint8)
    # values rounded to 0 keep their sign, as in the kernels: -0 and 0 are two codes
    code |= negative.to(torch.uint8) << 3
    return code[:, 0::2] | code[:, 1::2] << 4


def nibble_values(device: torch.device | str = "cpu") -> Tensor:
    """Return the two values of each byte, low nibble first: float32 [256, 2]."""
    values = torch.tensor([*VALUES, *(-value for value in VALUES)], device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1)


def scale_values(device: torch.device | str = "cpu") -> Tensor:
    """Return the value of each E4M3 byte: float32 [256]."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


def decoded_codes(codes: Tensor, nibbles: Tensor) -> Tensor:
    """Decode codes [N, K / 2] by the table of ``nibble_values`` to q, float32 [N * K / 16, 16]."""
    # gathers each pair of values as one float64: four times faster than gathering rows of two
    pairs = torch.index_select(nibbles.view(torch.float64).flatten(), 0, codes.flatten().int())
    return pairs.view(torch.float32).view(-1, BLOCK)


def decoded_operand(codes: Tensor, scales: Tensor, nibbles: Tensor, e4m3: Tensor) -> Tensor:
    """Return U = q * sf [N, K], exact in float32, of codes [N, K / 2] and scales [N, K / 16]."""
    sf = torch.index_select(e4m3, 0, scales.flatten().int()).unsqueeze(-1)
    return decoded_codes(codes, nibbles).mul_(sf).view(len(codes), -1)


def dequantize(packed: Packed) -> Tensor:
    """Return the weight that the packed form represents: float32 [N, K]."""
    unit = packed.scales.view(torch.float8_e4m3fn).float() * packed.amax * SPAN_INVERSE
    return (
        decoded_codes(packed.codes, nibble_values(packed.codes.device))
        .mul_(unit.view(-1, 1))
        .view(len(packed.codes), -1)
    )


def activation_amax(largest: Tensor, exact: bool = False) -> Tensor:
    """Return the amax of activations: a power of two unless ``exact``, NaN if not finite."""
    amax = largest.max()
    return torch.where(torch.isfinite(amax), amax, torch.nan) if exact else power_of_two_above(amax)


def expected_amax(previous: Tensor) -> Tensor:
    """Return the amax for activations whose largest |x| was ``previous`` one pass earlier.

    It is a power of two with a headroom of ``HEADROOM``, ``EXPECTED`` if ``previous`` is 0, and NaN
    if that is not finite. float32 [] like ``previous``.
    """
    power = (power_of_two_above(previous) * HEADROOM).clamp(max=LARGEST_POWER)
    return torch.where(previous == 0, torch.full_like(power, EXPECTED), power)


def _limits(largest: Tensor, exact: bool, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (block amax, tensor amax) of activations; a given amax may be smaller than a block."""
    if amax is None:
        return largest, activation_amax(largest, exact)
    # infinity would saturate, and nobody would notice
    return torch.where(torch.isfinite(largest), largest, torch.nan), amax


def pack_activation(x: Tensor, exact: bool = False, amax: Tensor | None = None) -> Packed:
    """Pack activations [M, K] like a weight, for kernels that take both operands packed.

    ``amax`` is as in ``quantize_activation``.
    """
    # values are not checked, because that would wait for the GPU
    values = x.float()
    return pack(values, *_limits(block_amax(values), exact, amax))


def quantize_activation(
    x: Tensor, exact: bool = False, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (U float32 [..., K], amax float32 []) of activations [..., K], K a multiple of 16.

    amax is rounded up to a power of two, because one amax is used for the whole batch and an exact
    one would let an image change the rounding of the others. The power of two changes only if
    another image has larger values than it, and then the E4M3 scales change by a power of two as
    well: the values stay the same unless a block's amax is below amax / 2^15, where E4M3 is
    subnormal. A non-finite amax gives NaN. ``exact`` uses amax unrounded, to measure the cost of
    rounding it. ``amax`` replaces that of x, float32 []; larger values saturate.
    """
    values, given = x.float(), amax is not None
    largest, amax = _limits(block_amax(values), exact, amax)
    s_enc = encoding_scale(amax)
    scales = block_scales(largest, s_enc).float()
    v = scaled(values, scales, s_enc)
    # as long as sf is normal, v exceeds 6 only by the rounding of sf to E4M3, at most 1/16, and
    # need not saturate; checked only where that needs no synchronization
    checked = not given and x.device.type == "cpu" and not torch.compiler.is_compiling()
    round_e2m1_(v, saturate=not checked or bool(scales.min() < E4M3_SMALLEST_NORMAL))
    return (v.unflatten(-1, (-1, BLOCK)) * scales.unsqueeze(-1)).flatten(-2), amax


def power_of_two_above(amax: Tensor) -> Tensor:
    """Return the smallest power of two >= amax; 0 stays 0, non-finite values become NaN."""
    mantissa, exponent = torch.frexp(amax)
    power = torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).to(exponent.dtype))
    return torch.where(amax == 0, amax, torch.where(torch.isfinite(amax), power, torch.nan))
