"""Operators that a CPU computes otherwise than a GPU, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from policy.precision import fp8, nvfp4
from policy.precision.layer import padded_rows, swizzled
from policy.precision.nvfp4 import BLOCK, SPAN_INVERSE


def compact(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Return block scales [rows, columns] of scales in cuBLAS's order, as ``swizzled`` has it."""
    across = -(-columns // 4)
    tiles = scales.view(-1, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1, 4 * across)[:rows, :columns]


def operand(codes: Tensor, scales: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return U = q * sf float32 [N, K] and amax / 2688 of packed codes [N, K / 2]."""
    nibbles = codes.contiguous().view(torch.uint8)
    rows, columns = len(nibbles), 2 * nibbles.shape[1] // BLOCK
    blocks = compact(scales[0].view(torch.uint8), rows, columns).contiguous()
    tables = nvfp4.nibble_values(), nvfp4.scale_values()
    return nvfp4.decoded_operand(nibbles, blocks, *tables), scales[1]


def nvfp4_product(
    a: Tensor, b: Tensor, scale_a: list[Tensor], recipe_a: Any, swizzle_a: Any,
    scale_b: list[Tensor], recipe_b: Any, swizzle_b: Any, bias: Tensor | None,
    out_dtype: torch.dtype, *_: Any, **__: Any,
) -> Tensor:  # fmt: skip
    """Return what ``torch.nn.functional.scaled_mm`` gives for two operands in NVFP4."""
    (left, of_left), (right, of_right) = operand(a, scale_a), operand(b.t(), scale_b)
    product = (left @ right.t()) * (of_left * of_right)
    return (product if bias is None else product + bias.float()).to(out_dtype)


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the kernel of this name gives, by the eager functions."""
    scales = fp8.row_scales(x)
    return fp8.quantize_rows(x, scales), scales


def nvfp4_tiles(x: Tensor, partial: Tensor, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the kernel of this name gives, by the eager function."""
    packed = nvfp4.pack_activation(padded_rows(x), exact)
    return packed.codes, swizzled(packed.scales), packed.amax * SPAN_INVERSE


def partial_amax(x: Tensor) -> Tensor:
    """Return what the kernel of this name gives, with one program: int32 [1]."""
    return x.float().abs().max().view(torch.int32).reshape(1)


def nvfp4_weight(x: Tensor, amax: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Return what the kernel of this name gives, by the eager function."""
    packed = nvfp4.quantize(x, search=last > first, amax=amax)
    return packed.codes, packed.scales


def rms_norm_backward(
    gradient: Tensor, x: Tensor, shape: list[int], inverse: Tensor, weight: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and of the weight; ``inverse`` is 1 / rms(x)."""
    over = list(range(-len(shape), 0))
    normed, scaled = x * inverse, gradient if weight is None else gradient * weight
    of_x = inverse * (scaled - normed * (scaled * normed).mean(over, keepdim=True))
    if weight is None:
        return of_x, None
    return of_x, (gradient * normed).reshape(-1, *shape).sum(0)


SUBSTITUTES: dict[str, Callable[..., Any]] = {
    # attention by matrix products: the other kernels have names of their own on a GPU
    "aten::_fused_sdp_choice": lambda *_, **__: 0,
    "aten::_scaled_mm_v2": nvfp4_product,
    # CPUs have none; torch 2.15 uses it on a GPU
    "aten::_fused_rms_norm_backward": rms_norm_backward,
    # Triton's interpreter takes seconds for what these take milliseconds
    "sol_rl::fp8_rows": fp8_rows,
    "sol_rl::partial_amax": partial_amax,
    "sol_rl::nvfp4_tiles": nvfp4_tiles,
    "sol_rl::nvfp4_weight": nvfp4_weight,
}
"""Functions in the place of operators, on CPU values."""
