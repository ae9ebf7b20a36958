"""``torch_nvfp4``: NVFP4 tensor cores through torch alone.

NOT VERIFIED: this has not run on a Blackwell GPU. Tested on a CPU are the packed buffers, the order
of the scales, the padding, and torch's own check of argument shapes (on fake tensors). Written for
torch 2.13. To check first on a GPU: ``tests/policy/test_nvfp4_hardware.py``, which compares with
the emulation; whether captured graphs survive a load, which copies in place; speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from policy.precision import kernels, nvfp4
from policy.precision.history import AmaxHistory, history_for
from policy.precision.layer import LastInput, QuantizedLinear, flatten_rows, padded_rows, swizzled
from policy.precision.nvfp4 import BLOCK, SPAN_INVERSE
from policy.precision.packing import NVFP4Packing


class NVFP4Weight(QuantizedLinear):
    """A weight in the layout of NVFP4 kernels, filled from the compact published form.

    On the device: ``codes`` uint8 [N, K / 2], ``swizzled`` uint8 [ceil(N/128) 128 * ceil(K/64) 4],
    ``amax`` and ``factor`` = amax / 2688 float32 [1]. The compact scales [N, K / 16] stay on the
    host: they are reordered after each load, and the kernel does not read them.
    """

    float32_buffers = ("amax", "factor")
    codes: Tensor
    swizzled: Tensor
    amax: Tensor
    factor: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        # not a buffer, which would move to the device with the module
        self.compact = torch.zeros(self.out_features, self.in_features // BLOCK, dtype=torch.uint8)
        self.add_buffer(linear, "codes", (self.out_features, self.in_features // 2), torch.uint8)
        self.add_buffer(linear, "swizzled", swizzled(self.compact).shape, torch.uint8)
        for name in self.float32_buffers:
            self.add_buffer(linear, name, (1,), torch.float32)

    def wire_targets(self) -> dict[str, Tensor]:
        """Return the tensors to fill; ``amax`` is published without dimensions and is a view."""
        return {"codes": self.codes, "scales": self.compact, "amax": self.amax.view(())}

    def finish_loading(self) -> None:
        """Reorder the scales and compute the factor, in place."""
        # in place, because a captured graph reads from the memory that it was captured with
        self.swizzled.copy_(swizzled(self.compact))
        torch.mul(self.amax, SPAN_INVERSE, out=self.factor)


class Operand(NamedTuple):
    """Packed activations [M, K] in the layout of the product.

    ``codes`` uint8 [M rounded up to a multiple of 16, K / 2], ``scales`` uint8 in cuBLAS's order,
    ``factor`` = amax / 2688 float32 [].
    """

    codes: Tensor
    scales: Tensor
    factor: Tensor


def pack_operand(x: Tensor, exact: bool, history: AmaxHistory | None = None) -> Operand:
    """Pack activations [..., K], K a multiple of 16, by their own amax or that of a ``history``.

    Uses two kernels if they are available, one if the history has an amax, else many torch
    operations with the same result.
    """
    rows = flatten_rows(x)
    if kernels.missing(x.device) is None:
        if history is None:
            return Operand(*kernels.nvfp4_pack(rows, exact))
        previous = history.previous if history.known else None
        return Operand(*kernels.nvfp4_pack_recording(rows, previous, history.current))
    amax = None if history is None or not rows.numel() else history.amax(rows.abs())
    packed = nvfp4.pack_activation(padded_rows(rows), exact, amax)
    return Operand(packed.codes, swizzled(packed.scales), packed.amax * SPAN_INVERSE)


def scaled_mm(
    x: Operand, codes: Tensor, scales: Tensor, factor: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return alpha (Ux Uw^T) + bias of packed x [M, K] and a weight [N, K] in kernel layout.

    The result is bfloat16 [M, N], rounded once; M is a multiple of 16. Each operand has two scales:
    E4M3 per block of 16, and float32 per tensor, amax / 2688, so that the kernel applies alpha
    before it rounds.
    """
    # imported here, because torch before 2.10 has neither, and must import this file to report so
    from torch.nn.functional import ScalingType, SwizzleType
    from torch.nn.functional import scaled_mm as torch_scaled_mm

    recipe = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    order = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    return torch_scaled_mm(
        x.codes.view(torch.float4_e2m1fn_x2),
        codes.view(torch.float4_e2m1fn_x2).t(),
        scale_a=[x.scales.view(torch.float8_e4m3fn), x.factor],
        scale_recipe_a=recipe,
        scale_b=[scales.view(torch.float8_e4m3fn), factor.view(())],
        scale_recipe_b=recipe,
        swizzle_a=order,
        swizzle_b=order,
        bias=None if bias is None else bias.to(torch.bfloat16),
        output_dtype=torch.bfloat16,
    )


class TorchNVFP4Linear(NVFP4Weight):
    """Linear layer x [..., K] -> [..., N] with a cuBLAS product.

    Activations are packed once for all layers that read them.
    """

    def __init__(
        self, linear: nn.Linear, last: LastInput, exact: bool, history: AmaxHistory | None = None
    ) -> None:
        super().__init__(linear)
        self._last, self._exact, self.history = last, exact, history

    def forward(self, x: Tensor) -> Tensor:
        """Return alpha (Ux Uw^T) + bias."""
        packed = self._last.get_or_compute(x, lambda x: pack_operand(x, self._exact, self.history))
        y = scaled_mm(packed, self.codes, self.swizzled, self.factor, self.bias)
        # without the padding rows
        return self.shaped(y.narrow(0, 0, x.numel() // self.in_features), x)


class TorchNVFP4(NVFP4Packing):
    """The backend ``torch_nvfp4``."""

    name = "torch_nvfp4"
    dtype = torch.bfloat16
    fuses = packs_eagerly = True
    auto_on = "cuda"
    capability = (10, 0)  # the first with NVFP4 tensor cores
    speedup = 4

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Return a reason unless it is a Blackwell GPU with torch 2.10 or later, else None."""
        if not hasattr(torch.nn.functional, "scaled_mm"):
            return (
                f"torch {torch.__version__} has no torch.nn.functional.scaled_mm, which needs"
                " version 2.10 or later"
            )
        if device.type != "cuda" or not torch.cuda.is_available():
            return "NVFP4 kernels need a Blackwell GPU, but torch sees no CUDA device"
        present = torch.cuda.get_device_capability(device)
        if present >= self.capability:
            return None
        return (
            "NVFP4 kernels need a Blackwell GPU of compute capability 10.0, but this one has"
            f" {present[0]}.{present[1]}"
        )

    def unsupported_reason(self, rows: int, columns: int) -> str | None:
        """Return a reason, or None if K / 2 and N are multiples of 16 as the kernels require."""
        if columns % 32:
            return f"K = {columns} is not a multiple of 32"
        return f"N = {rows} is not a multiple of 16" if rows % 16 else None

    def replacements(self, activation_amax: str) -> Callable[[nn.Linear], QuantizedLinear]:
        """Return a function to layers that share the packed input."""
        last, exact, history = LastInput(), activation_amax == "exact", history_for(activation_amax)
        return lambda linear: TorchNVFP4Linear(linear, last, exact, history(linear))
