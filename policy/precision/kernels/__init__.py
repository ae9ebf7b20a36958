"""Triton kernels that pack activations and weights, one launch per pass over memory.

    fp8_pack              1 launch    2 + 1 bytes per bfloat16 element, and 4 per row
    nvfp4_pack            2 launches  2 for the amax of the tensor; then 2 + 0.5 + 1 / 16
    nvfp4_pack_recording  1 launch    2 + 0.5 + 1 / 16, by the amax of the previous pass
    nvfp4_pack_weight     1 launch    2 + 0.5 + 1 / 16, with the search for scales

NVFP4 has one amax for the whole tensor, which is known only after all of it has been read, so the
tensor is read twice, unless the amax of the previous pass is used (``policy.precision.history``).
The results are bit-identical to ``fp8.quantize_rows``, ``nvfp4.pack_activation`` and
``layer.swizzled``, which run where these kernels are not available; only codes under a NaN scale
may differ.

Used on CUDA only; with TRITON_INTERPRET=1 they run on a CPU, for tests. On an H200 the bits have
been verified (docs/gpu.md), those of NVFP4 too, although Hopper GPUs cannot multiply NVFP4. The
operators are opaque to torch.compile, which keeps them in the same graph, and support tensors
without data.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType

import torch
from torch import Tensor

from records.errors import error_summary

PARTIALS = 256
"""Maximum number of programs that compute partial amax values: two per SM of a large GPU.

Every tile reads all partial results again, 0.125 bytes per element, from the L2 cache.
"""
ELEMENTS = 8192
"""Elements that one program holds in registers at a time."""
BLOCKS = 128
"""Blocks of 16 weights that one program packs; each is read once and tried with every scale."""


def missing(device: torch.device) -> str | None:
    """Return why activations are not packed by kernels on this device, or None if they are."""
    if device.type != "cuda":
        return f"the packing kernels run on CUDA only, not on {device.type}"
    why = triton_unusable()
    return None if why is None else f"the packing kernels need Triton: {why}"


def triton_unusable() -> str | None:
    """Return why Triton cannot compile for this machine's GPU, or None; also None without a GPU."""
    return _triton_unusable()


@functools.cache
def _triton_unusable() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return None
    from triton.runtime import driver

    try:
        _ = driver.active  # as in every launch; the first time, it compiles a module in C
    except Exception as error:  # of the compiler, the cache's files, or the driver
        return (
            f"{error_summary(error, 200)}: it needs a C compiler, Python's headers, and HOME or"
            " TRITON_CACHE_DIR that can be written"
        )
    return None


def _programs(device: torch.device) -> ModuleType:
    """Return the module of Triton programs; imported lazily, as Triton takes seconds to import.

    Raises ValueError if they cannot run on this device.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"packing kernels run on CUDA, not on {device.type}, except under TRITON_INTERPRET=1"
        )
    return importlib.import_module("policy.precision.kernels.programs")


def padded(rows: int, multiple: int = 16) -> int:
    """Round up the rows of a packed operand: cuBLAS requires a multiple of 16."""
    return -(-rows // multiple) * multiple


def partials(count: int) -> int:
    """Return the number of partial amax programs for ``count`` elements.

    It is a power of two, at most PARTIALS.
    """
    return min(PARTIALS, 1 << max(0, -(-count // ELEMENTS) - 1).bit_length())


# ---- operators, one launch each


@torch.library.custom_op("sol_rl::fp8_rows", mutates_args=())
def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes float8_e4m3fn [M, K] and scales float32 [M, 1] of x [M, K]."""
    codes, scales = _fp8_shapes(x)
    rows, columns = x.shape
    if rows:
        # Triton's blocks are powers of two. No kernel may fuse a product with a sum (FMA), which
        # rounds once where the reference arithmetic rounds twice
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
    """Return partial amax values of x [M, K] as the bits of float32: int32 [programs]."""
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
    """Return codes, scales in cuBLAS's order and factor of x [M, K], as ``nvfp4_pack``."""
    return _tiles(x, partial, None, exact, previous=False)


@nvfp4_tiles.register_fake
def _nvfp4_shapes(x: Tensor, partial: Tensor, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = padded(len(x)), x.shape[1]
    tiles = -(-rows // 128) * -(-columns // 64)
    return (
        torch.empty(rows, columns // 2, dtype=torch.uint8, device=x.device),
        torch.empty(tiles * 512, dtype=torch.uint8, device=x.device),
        torch.empty((), dtype=torch.float32, device=x.device),
    )


@torch.library.custom_op("sol_rl::nvfp4_tiles_recording", mutates_args=("current",))
def nvfp4_tiles_recording(
    x: Tensor, partial: Tensor, current: Tensor, previous: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return as ``nvfp4_tiles``; raise ``current`` int32 [PARTIALS] to the bits of |x|.

    With ``previous`` the amax in ``partial`` is that of the pass before.
    """
    return _tiles(x, partial, current, False, previous)


@nvfp4_tiles_recording.register_fake
def _recording_shapes(
    x: Tensor, partial: Tensor, current: Tensor, previous: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _nvfp4_shapes(x, partial, False)


def _tiles(
    x: Tensor, partial: Tensor, current: Tensor | None, exact: bool, previous: bool
) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales, factor = _nvfp4_shapes(x, partial, exact)
    # at least one program, even without rows: it writes the factor
    grid = (max(1, -(-len(codes) // 128)), -(-x.shape[1] // 64))
    _programs(x.device).nvfp4_tiles[grid](
        x, partial, codes, scales, factor, partial if current is None else current,
        len(x), len(codes), x.shape[1],
        PARTIALS=len(partial), EXACT=exact, PREVIOUS=previous,
        SLOTS=0 if current is None else len(current), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scales, factor


@torch.library.custom_op("sol_rl::nvfp4_weight", mutates_args=())
def nvfp4_weight(x: Tensor, amax: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Return codes uint8 [N, K / 2] and scales uint8 [N, K / 16] of x [N, K], K / 16 whole.

    Scales are searched at the offsets ``first`` to ``last - 1`` of the plain ones.
    """
    codes, scales = _weight_shapes(x, amax, first, last)
    if count := scales.numel():
        _programs(x.device).nvfp4_weight[(-(-count // BLOCKS),)](
            x, amax, codes, scales, count,
            FIRST=first, LAST=last, BLOCKS=BLOCKS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scales


@nvfp4_weight.register_fake
def _weight_shapes(x: Tensor, amax: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    return (
        torch.empty(rows, columns // 2, dtype=torch.uint8, device=x.device),
        torch.empty(rows, columns // 16, dtype=torch.uint8, device=x.device),
    )


# ---- functions for the layers, and for publishing


def fp8_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    """Pack activations [M, K]: E4M3 codes float8_e4m3fn [M, K] and scales float32 [M, 1]."""
    return fp8_rows(x.contiguous())


def nvfp4_pack(x: Tensor, exact: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Pack activations [M, K], K a multiple of 16, to NVFP4 in the layout of the product.

    Returns (codes uint8 [M rounded up to a multiple of 16, K / 2] with zero rows at the end, E4M3
    scales uint8 in cuBLAS's order, amax / 2688 float32 []). With ``exact`` amax is not rounded up
    to a power of two. A non-finite x makes the factor and all scales NaN.
    """
    x = x.contiguous()
    return nvfp4_tiles(x, partial_amax(x), exact)


def nvfp4_pack_recording(
    x: Tensor, previous: Tensor | None, current: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Pack as ``nvfp4_pack`` by the amax of the pass before, and record that of this one.

    ``previous`` and ``current`` are those of ``history.AmaxHistory``; without ``previous`` the amax
    of x is computed first. A block with a value that is not finite gets the scale NaN.
    """
    x = x.contiguous()
    partial = partial_amax(x) if previous is None else previous
    return nvfp4_tiles_recording(x, partial, current, previous is not None)


def tensor_amax(x: Tensor) -> Tensor:
    """Return max|x|, float32 [], of x [M, K]; not finite if a value of x is not."""
    return partial_amax(x.contiguous()).max().view(torch.float32)


def nvfp4_pack_weight(x: Tensor, amax: Tensor, offsets: range) -> tuple[Tensor, Tensor]:
    """Pack a finite weight [N, K], K a multiple of 16, with the amax float32 [] of its tensor.

    Returns (codes uint8 [N, K / 2], E4M3 scales uint8 [N, K / 16]), as ``nvfp4.quantize``. Scales
    are searched among ``offsets`` of E4M3 codes, which may be empty.
    """
    return nvfp4_weight(x.contiguous(), amax, offsets.start, offsets.stop)
