"""Packing kernels: bits compared with eager functions on a CPU, time with that of a copy."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from unittest import mock

import torch
from torch import Tensor

from bench.gpu_check.findings import Finding, Item, LeftOut
from bench.gpu_check.setting import Setting
from bench.packing import as_json
from bench.timing import interleave
from policy.device import synchronize
from policy.precision import kernels, nvfp4
from policy.precision.cost import FUSED, PREVIOUS_PASS
from policy.precision.fp8 import quantize_rows, row_scales
from policy.precision.history import AmaxHistory
from policy.precision.layer import padded_rows, swizzled
from policy.precision.nvfp4 import SPAN_INVERSE, expected_amax, pack_activation

SHAPES = ((8 * 4608, 3072), (8 * 4608, 12288), (8 * 1024, 2240))
"""Activations of FLUX.1's blocks, its widest input, and SANA's, for 8 images of 1024 x 1024."""
SMALL_SHAPES = ((48, 64), (17, 96))
FEW_ROWS = 500
"""Number of rows whose bits are compared, as a CPU needs minutes for all rows.

It is not a multiple of a tile.
"""
BEFORE = 4.5
"""Largest |x| of the previous pass."""
REPEATS, CALLS = 10, 20
"""Repeats, and calls per repeat: timed together, so that launch overhead on the CPU is hidden."""


def fp8_reference(x: Tensor) -> tuple[Tensor, ...]:
    """Return the expected result of ``kernels.fp8_pack``: codes as bytes, scales."""
    scales = row_scales(x)
    return quantize_rows(x, scales).view(torch.uint8), scales


def nvfp4_reference(x: Tensor) -> tuple[Tensor, ...]:
    """Return the expected result of ``kernels.nvfp4_pack``."""
    packed = pack_activation(padded_rows(x))
    return packed.codes, swizzled(packed.scales), packed.amax * SPAN_INVERSE


def previous_pass_reference(x: Tensor) -> tuple[Tensor, ...]:
    """Return the expected result of ``previous_pass_kernel``."""
    packed = pack_activation(padded_rows(x), amax=expected_amax(torch.tensor(BEFORE)))
    return packed.codes, swizzled(packed.scales), packed.amax * SPAN_INVERSE


def previous_pass_kernel(x: Tensor) -> tuple[Tensor, ...]:
    """Return the result of ``kernels.nvfp4_pack_recording`` after a pass with amax ``BEFORE``."""
    return kernels.nvfp4_pack_recording(x, *_history(x.device))


@cache
def _history(device: torch.device) -> tuple[Tensor, Tensor]:
    history = AmaxHistory(device)
    history.previous.fill_(torch.tensor(BEFORE).view(torch.int32))
    return history.previous, history.current


def fp8_kernel(x: Tensor) -> tuple[Tensor, ...]:
    """Return the result of ``kernels.fp8_pack``: codes as bytes, scales."""
    codes, scales = kernels.fp8_pack(x)
    return codes.view(torch.uint8), scales


def weight_kernel(x: Tensor) -> tuple[Tensor, ...]:
    """Return the result of ``kernels.nvfp4_pack_weight`` with the search for scales."""
    return kernels.nvfp4_pack_weight(x, kernels.tensor_amax(x), nvfp4.SEARCH_OFFSETS)


def weight_reference(x: Tensor) -> tuple[Tensor, ...]:
    """Return the expected result of ``weight_kernel``."""
    values = x.float()
    # on a CPU too in the order of the kernel: two scales may be equally good but for rounding
    with mock.patch.object(nvfp4, "block_sum", nvfp4.pair_sums):
        packed = nvfp4.pack(values, nvfp4.block_amax(values), values.abs().max(), search=True)
    return packed.codes, packed.scales


PACKS: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], ...]] = {
    "fp8": (fp8_kernel, fp8_reference),
    "nvfp4": (kernels.nvfp4_pack, nvfp4_reference),
    "nvfp4 previous_pass": (previous_pass_kernel, previous_pass_reference),
    "nvfp4 weights": (weight_kernel, weight_reference),
}
"""(the kernel, the eager functions that it replaces) as in ``bench.packing.FORMATS``."""
TIMED = {"nvfp4 weights": "time of weights"}
"""Kind of time, if it is not limited by memory: the search computes some 200 steps per weight."""
MOVED = {form: packing.bytes for form, packing in FUSED.items()}
MOVED["nvfp4 previous_pass"] = PREVIOUS_PASS.bytes
MOVED["nvfp4 weights"] = 2 + 2 + 0.5 + 1 / 16  # bytes per element: read twice, codes, scales


def measure(setting: Setting) -> Iterator[Item]:
    """Yield counts, which do not depend on the machine, then bits, and on a GPU times."""
    for form, counted in as_json().items():
        yield Finding(
            f"{form}, bytes moved per element",
            counted["bytes_per_element"],
            "B",
            {"format": form, "kind": "count"},
            {"kernels": counted["kernels"], "eager": counted["eager"]["bytes_per_element"]},
        )
    if importlib.util.find_spec("triton") is None:
        yield LeftOut("the kernels' bits", "the package triton is not installed")
        return
    for rows, columns in SHAPES if setting.gpu else SMALL_SHAPES:
        generator = torch.Generator().manual_seed(0)
        few = torch.randn(min(rows, FEW_ROWS), columns, generator=generator).bfloat16()
        for form in PACKS:
            yield _bits(form, few, setting)
            if setting.gpu:
                x = torch.randn(rows, columns, device=setting.device, dtype=torch.bfloat16)
                yield _time(form, x)
    if not setting.gpu:
        yield LeftOut("the kernels' seconds", "there is no GPU")


def _bits(form: str, x: Tensor, setting: Setting) -> Finding:
    """Return the share of the kernel's elements that differ from the eager functions on a CPU."""
    kernel, reference = PACKS[form]
    actual = [part.cpu() for part in kernel(x.to(setting.device))]
    expected = reference(x)
    differ = sum(
        int((a.flatten() != b.flatten()).sum()) for a, b in zip(actual, expected, strict=True)
    )
    count = sum(part.numel() for part in expected)
    return Finding(
        f"{form} {list(x.shape)}, elements that differ from the eager packing on a CPU",
        differ / count,
        "share",
        {"format": form, "kind": "bits", "shape": f"{len(x)} x {x.shape[1]}"},
    )


def _time(form: str, x: Tensor) -> Finding:
    """Return the time of packing x by the kernel relative to copying x, measured alternately."""
    kernel, eager = PACKS[form]
    copy = torch.empty_like(x)

    def timed(do: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(CALLS):
                do()
            synchronize(x.device)

        return run

    times = interleave(
        {
            "copy": timed(lambda: copy.copy_(x)),
            "kernel": timed(lambda: kernel(x)),
            "eager": timed(lambda: eager(x)),
        },
        REPEATS,
        warm_up=3,
    )
    median = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    moved = x.numel() * MOVED[form]
    return Finding(
        f"{form} {list(x.shape)}, packing by kernels / copying the same tensor",
        median["kernel"] / median["copy"],
        "x",
        {"format": form, "kind": TIMED.get(form, "time"), "shape": f"{len(x)} x {x.shape[1]}"},
        {
            "expected": MOVED[form] / 4.0,  # a copy moves 4 bytes per bfloat16 element
            "eager": median["eager"] / median["copy"],
            "GB/s": moved * CALLS / median["kernel"] / 1e9,
        },
    )
