"""Packing of activations by one kernel per pass over memory, written in Triton: FP8 and NVFP4.

    fp8_pack      1 launch    2 + 1 bytes per bfloat16 element, and 4 per row
    nvfp4_pack    2 launches  2 for the range of the tensor; then 2 + 0.5 + 1 / 16

NVFP4 has one range for the whole tensor, which is known only when all of it has been read, so it is
read twice. Results are bit-equal to ``fp8.quantize_rows``, ``nvfp4.pack_activation`` and
``layer.swizzled``, which are what runs where these kernels do not; only codes under a scale that is
NaN may differ.

Used on CUDA, nowhere else; under TRITON_INTERPRET=1 they run on a CPU, for tests. On an H200 they
give these bits (docs/gpu.md); NVFP4's have run there too, though no Hopper GPU multiplies them. The
operators are opaque to torch.compile, which puts them in one graph with the rest, and know their
shapes on tensors without data.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType

import torch
from torch import Tensor

PARTIALS = 256
"""Programs that look for a range: two per multiprocessor of a large GPU. Every tile reads all their
results again, 0.125 bytes per element, from the L2 cache.
"""
ELEMENTS = 8192
"""What one program has in registers at a time."""


def missing(device: torch.device) -> str | None:
    """Why activations are not packed by kernels on this device, or None when they are."""
    if device.type != "cuda":
        return f"the packing kernels are for CUDA, not for {device.type}"
    return None if _installed() else "the packing kernels need the package triton"


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _programs(device: torch.device) -> ModuleType:
    """The programs, imported when first launched: Triton takes seconds to import."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"packing kernels run on CUDA, not on {device.type}, except under TRITON_INTERPRET=1"
        )
    return importlib.import_module("policy.precision.kernels.programs")


def padded(rows: int, multiple: int = 16) -> int:
    """Rows of a packed operand: what cuBLAS multiplies has a multiple of 16."""
    return -(-rows // multiple) * multiple


def partials(count: int) -> int:
    """Programs that look for the range of ``count`` elements: a power of two, at most PARTIALS."""
    return min(PARTIALS, 1 << max(0, -(-count // ELEMENTS) - 1).bit_length())


# ---- operators: each is one launch


@torch.library.custom_op("sol_rl::fp8_rows", mutates_args=())
def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes float8_e4m3fn [M, K] and scales float32 [M, 1] of x [M, K]."""
    codes, scales = _fp8_shapes(x)
    rows, columns = x.shape
    if rows:
        # Triton's blocks are powers of two. No kernel here may fuse a product with a sum: that
        # rounds once where the arithmetic that it must equal rounds twice
        width = max(16, 1 << (columns - 1).bit_length())
        _programs(x.device).fp8_rows[(rows,)](
            x, codes.view(torch.uint8), scales, columns,
            WIDTH=width, HARDWARE=x.is_cuda, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scales


@fp8_rows.register_fake
def _fp8_shapes(x: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device),
        torch.empty(len(x), 1, dtype=torch.float32, device=x.device),
    )


@torch.library.custom_op("sol_rl::partial_amax", mutates_args=())
def partial_amax(x: Tensor) -> Tensor:
    """Largest magnitudes of shares of x [M, K], as the bits of float32: int32 [programs]."""
    partial = _partial_shapes(x)
    _programs(x.device).partial_amax[(len(partial),)](
        x, partial, x.numel(), BLOCK=ELEMENTS, num_warps=8, enable_fp_fusion=False
    )
    return partial


@partial_amax.register_fake
def _partial_shapes(x: Tensor) -> Tensor:
    return torch.empty(partials(x.numel()), dtype=torch.int32, device=x.device)


@torch.library.custom_op("sol_rl::nvfp4_tiles", mutates_args=())
def nvfp4_tiles(x: Tensor, partial: Tensor, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales in cuBLAS's order and factor of x [M, K]: see ``nvfp4_pack``."""
    codes, scales, factor = _nvfp4_shapes(x, partial, exact)
    # one program at least, also for no rows: it writes the factor
    grid = (max(1, -(-len(codes) // 128)), -(-x.shape[1] // 64))
    _programs(x.device).nvfp4_tiles[grid](
        x, partial, codes, scales, factor, len(x), len(codes), x.shape[1],
        PARTIALS=len(partial), EXACT=exact, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scales, factor


@nvfp4_tiles.register_fake
def _nvfp4_shapes(x: Tensor, partial: Tensor, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = padded(len(x)), x.shape[1]
    tiles = -(-rows // 128) * -(-columns // 64)
    return (
        torch.empty(rows, columns // 2, dtype=torch.uint8, device=x.device),
        torch.empty(tiles * 512, dtype=torch.uint8, device=x.device),
        torch.empty((), dtype=torch.float32, device=x.device),
    )


# ---- what layers call


def fp8_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes float8_e4m3fn [M, K] and scales float32 [M, 1] of activations [M, K]."""
    return fp8_rows(x.contiguous())


def nvfp4_pack(x: Tensor, exact: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """NVFP4 of activations [M, K], K a multiple of 16, as a product reads it.

    (codes uint8 [M up to a multiple of 16, K / 2] with zero rows after the others, E4M3 scales
    uint8 in cuBLAS's order, amax / 2688 float32 []). ``exact``: amax is not rounded up to a power
    of two. A non-finite x makes the factor and all scales NaN.
    """
    x = x.contiguous()
    return nvfp4_tiles(x, partial_amax(x), exact)
