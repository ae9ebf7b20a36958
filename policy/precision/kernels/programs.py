"""Triton programs that pack activations and weights; ``policy.precision.kernels`` launches them.

They are written so that no compiler may change a bit. Values are compared, clamped and rounded as
integers, so that no product is followed by a sum, which could be contracted to an FMA. E4M3 and
E2M1 codes are computed from these integers because Triton's interpreter rounds its casts
differently (FP8 on a GPU uses the GPU's cast). Divisions use the correctly rounded ``div_rn``, as
``/`` is not. Offsets are int64, for more than 2^31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

ABSOLUTE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
LARGEST = tl.constexpr(0x7F7FFFFF)  # FLT_MAX
SMALLEST = tl.constexpr(0x00800000)  # the smallest normal number
MANTISSA = tl.constexpr(0x007FFFFF)


@triton.jit
def as_float32(x):
    """Convert x to float32, bfloat16 by its bits: the interpreter converts subnormals wrongly."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def magnitude_bits(v):
    """Return |v| as the bits of float32: integers in the same order as the values, NaN largest."""
    return v.to(tl.int32, bitcast=True) & ABSOLUTE


@triton.jit
def e4m3_code(bits):
    """Return the E4M3 byte of |v| from its float32 bits: half to even, max 448, NaN as 127."""
    low = tl.minimum(bits, 0x43E00000)  # 448
    # normal: drop 20 bits of the mantissa, half to even, and move the exponent's bias from 127 to 7
    normal = ((low + 0x7FFFF + ((low >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6: the last bit of 2^14 is 2^-9, the step of E4M3's subnormals
    shifted = low.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000  # the bits of 16384.0
    code = tl.where(low < 0x3C800000, subnormal, normal)
    return tl.where(bits > INFINITY, 127, code)


@triton.jit
def e4m3_value(code):
    """Return the float32 value of the E4M3 byte of a non-negative number."""
    normal = ((code << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)  # 2^-9
    return tl.where(code == 127, float("nan"), value)


@triton.jit
def e2m1_code(v):
    """Return the E2M1 nibble of v: half to even, saturating at 6; zeros keep their sign."""
    low = tl.minimum(magnitude_bits(v), 0x40C00000)  # 6
    normal = ((low + 0x1FFFFF + ((low >> 22) & 1)) >> 22) - 252
    # below 1: the last bit of 2^22 is 0.5
    shifted = low.to(tl.float32, bitcast=True) + 4194304.0
    small = shifted.to(tl.int32, bitcast=True) - 0x4A800000  # the bits of 2^22
    return tl.where(low < 0x3F800000, small, normal) | tl.where(v < 0, 8, 0)


@triton.jit
def e2m1_value(bits):
    """Return |v| rounded to E2M1 from its float32 bits: half to even, at most 6."""
    low = tl.minimum(bits, 0x40C00000)  # 6
    normal = ((low + 0x1FFFFF + ((low >> 22) & 1)) & 0x7FC00000).to(tl.float32, bitcast=True)
    small = low.to(tl.float32, bitcast=True) + 4194304.0 - 4194304.0  # multiples of 0.5
    return tl.where(low < 0x3F800000, small, normal)


@triton.jit
def inverse_scale(scale, encode):
    """Return the factor of elements before rounding; a zero scale has the largest one."""
    largest = tl.full((), LARGEST, tl.int32).to(tl.float32, bitcast=True)
    decoded = scale * tl.div_rn(1.0, encode)
    # a division by zero must be avoided
    inverse = tl.div_rn(1.0, tl.where(decoded == 0.0, 1.0, decoded))
    return tl.where((decoded == 0.0) | (inverse > largest), largest, inverse)


@triton.jit
def encoding_scale(top):
    """Return S_enc for the amax ``top`` of a tensor."""
    largest = tl.full((), LARGEST, tl.int32).to(tl.float32, bitcast=True)
    zero = top == 0.0
    encode = tl.div_rn(2688.0, tl.where(zero, 1.0, top))
    encode = tl.where(encode > largest, largest, encode)
    return tl.where(zero | (encode == 0.0), 1.0, encode)


@triton.jit
def block_sum(v, BLOCKS: tl.constexpr):
    """Sum blocks [BLOCKS, 16] by pairs of neighbors, an order that no compiler chooses."""
    even, odd = tl.split(tl.reshape(v, (BLOCKS, 8, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (BLOCKS, 4, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (BLOCKS, 2, 2)))
    even, odd = tl.split(even + odd)
    return even + odd


@triton.jit
def block_error(v, code, encode, top, BLOCKS: tl.constexpr):
    """Return the squared error of blocks |v| [BLOCKS, 16] with these E4M3 scale codes."""
    scale = e4m3_value(code)
    q = e2m1_value(magnitude_bits(v * inverse_scale(scale, encode)[:, None]))
    difference = q * (scale * top * 0.0003720238164532930)[:, None] - v  # fp32(1 / 2688)
    return block_sum(difference * difference, BLOCKS)


@triton.jit
def power_of_two_above(bits):
    """Return the bits of the smallest power of two >= the number with these bits; 0 stays 0."""
    filled = bits - 1  # for subnormals: set all bits below the highest one, then add one
    filled |= filled >> 1
    filled |= filled >> 2
    filled |= filled >> 4
    filled |= filled >> 8
    filled |= filled >> 16
    power = tl.where(bits < SMALLEST, filled + 1, (bits + MANTISSA) & INFINITY)
    return tl.where(bits == 0, 0, power)


@triton.jit
def fp8_rows(x, codes, scales, columns, WIDTH: tl.constexpr, HARDWARE: tl.constexpr):
    """Pack one row per program: read it once, keep it in registers, write its codes and scale.

    HARDWARE uses the GPU's cast to E4M3, which rounds like ``e4m3_code`` in a fifth of the time.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < columns
    v = as_float32(tl.load(x + row * columns + column, mask=inside, other=0.0))
    amax = tl.max(magnitude_bits(v), 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, 448.0)
    least = tl.full((), SMALLEST, tl.int32).to(tl.float32, bitcast=True)
    scale = tl.where(scale < least, least, scale)  # keeps NaN
    scaled = v * tl.div_rn(1.0, scale)
    if HARDWARE:
        # propagates NaN, which would otherwise become 448
        limited = tl.maximum(scaled, -448.0, propagate_nan=tl.PropagateNan.ALL)
        limited = tl.minimum(limited, 448.0, propagate_nan=tl.PropagateNan.ALL)
        code = limited.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = scaled.to(tl.int32, bitcast=True)
        code = (e4m3_code(bits & ABSOLUTE) | ((bits >> 24) & 128)).to(tl.uint8)
    tl.store(codes + row * columns + column, code, mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def partial_amax(x, partial, count, BLOCK: tl.constexpr):
    """Write max|x| of every ``tl.num_programs``-th block of elements, as bits: int32 [programs]."""
    program = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.int32)
    for start in range(program * BLOCK, count, tl.num_programs(0).to(tl.int64) * BLOCK):
        index = start + tl.arange(0, BLOCK)
        v = tl.load(x + index, mask=index < count, other=0.0)
        largest = tl.maximum(largest, magnitude_bits(as_float32(v)))
    tl.store(partial + program, tl.max(largest, 0))


@triton.jit
def nvfp4_tiles(
    x, partial, codes, scales, factor, current, rows, padded, columns,
    PARTIALS: tl.constexpr, EXACT: tl.constexpr, PREVIOUS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Pack one tile of 128 x 64 elements per program: codes, and 512 scales in cuBLAS's order.

    PREVIOUS: the amax is that of another input, see ``nvfp4.expected_amax``. If SLOTS is not 0, the
    largest |x| is recorded in one of these elements of ``current``.
    """
    # every program recomputes the tensor scale from a few hundred numbers, which stay in L2
    bits = tl.max(tl.load(partial + tl.arange(0, PARTIALS)), 0)
    top = bits if EXACT else power_of_two_above(bits)
    if PREVIOUS:
        # a headroom of 2^3, at most 2^127; 2^12 after an input that was all zero
        wide = tl.minimum(top, 0x7D800000).to(tl.float32, bitcast=True) * 8.0
        top = tl.where(bits == 0, 0x45800000, wide.to(tl.int32, bitcast=True))
    top = tl.where(bits < INFINITY, top, 0x7FC00000).to(tl.float32, bitcast=True)
    encode = encoding_scale(top)

    tile_row, tile_column = tl.program_id(0), tl.program_id(1)
    row = tile_row.to(tl.int64) * 128 + tl.arange(0, 128)[:, None]
    column = tile_column * 64 + tl.arange(0, 64)[None, :]
    inside = (row < rows) & (column < columns)
    v = as_float32(tl.load(x + row * columns + column, mask=inside, other=0.0))
    v = tl.reshape(v, (128, 4, 16))
    seen = tl.max(magnitude_bits(v), 2)
    if SLOTS:
        program = tile_row * tl.num_programs(1) + tile_column
        tl.atomic_max(current + program % SLOTS, tl.max(tl.max(seen, 1), 0))
    if PREVIOUS:  # infinity would saturate
        seen = tl.where(seen < INFINITY, seen, 0x7FC00000)
    block = seen.to(tl.float32, bitcast=True)
    code = e4m3_code(magnitude_bits(block * (encode * 0.1666666716337204)))  # fp32(1 / 6)
    scale = e4m3_value(code)
    inverse = inverse_scale(scale, encode)
    # two neighbors share a byte, the even one in the low nibble
    even, odd = tl.split(tl.reshape(e2m1_code(v * inverse[:, :, None]), (128, 32, 2)))

    pair = tile_column * 32 + tl.arange(0, 32)[None, :]
    kept = (row < padded) & (pair < columns // 2)
    tl.store(codes + row * (columns // 2) + pair, (even | (odd << 4)).to(tl.uint8), mask=kept)
    # row 32 a + b and block c of a tile lie at byte 16 b + 4 a + c
    r, c = tl.arange(0, 128)[:, None], tl.arange(0, 4)[None, :]
    tile = (tile_row.to(tl.int64) * tl.num_programs(1) + tile_column) * 512
    exists = (row < padded) & (tile_column * 4 + c < columns // 16)
    swizzled = tile + 16 * (r % 32) + 4 * (r // 32) + c
    tl.store(scales + swizzled, tl.where(exists, code, 0).to(tl.uint8))
    if (tile_row == 0) & (tile_column == 0):
        tl.store(factor, top * 0.0003720238164532930)  # fp32(1 / 2688)


@triton.jit
def nvfp4_weight(
    x, amax, codes, scales, count,
    FIRST: tl.constexpr, LAST: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Pack BLOCKS of ``count`` blocks of 16 elements per program, with the tensor's amax.

    The scale of a block is that of least squared error among the plain one and those at offsets
    FIRST to LAST - 1 of its E4M3 code; ties keep the earlier one. No offsets: the plain one.
    """
    top = tl.load(amax)
    encode = encoding_scale(top)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    exists = block < count
    element = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    v = as_float32(tl.load(x + element, mask=exists[:, None], other=0.0))
    bits = magnitude_bits(v)
    size = bits.to(tl.float32, bitcast=True)
    block_amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
    plain = e4m3_code(magnitude_bits(block_amax * (encode * 0.1666666716337204)))  # fp32(1 / 6)
    chosen = plain
    if FIRST < LAST:
        least = block_error(size, plain, encode, top, BLOCKS)
        for offset in range(FIRST, LAST):
            candidate = tl.minimum(tl.maximum(plain + offset, 0), 126)  # 126 is 448, 127 is NaN
            error = block_error(size, candidate, encode, top, BLOCKS)
            chosen = tl.where(error < least, candidate, chosen)
            least = tl.where(error < least, error, least)
    inverse = inverse_scale(e4m3_value(chosen), encode)
    even, odd = tl.split(tl.reshape(e2m1_code(v * inverse[:, None]), (BLOCKS, 8, 2)))
    pair = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(codes + pair, (even | (odd << 4)).to(tl.uint8), mask=exists[:, None])
    tl.store(scales + block, chosen.to(tl.uint8), mask=exists)
