"""``fp8``: E4M3 matrix products with one scale per row, for Hopper and Ada; on a CPU for tests.

Every row of the activations [M, K] and of the weight [N, K] has s = max|row| / 448 and codes
e4m3(row * (1 / s)); divisions would take a GPU longer than the memory traffic. y = bf16((codes_x
codes_w^T) s_x s_w^T + bias), with sums in float32. A row's codes depend only on that row, so an
image does not depend on the rest of the batch. The kernel is torch's ``_scaled_mm`` with row-wise
scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from policy.device import torch_release
from policy.precision import kernels
from policy.precision.base import Backend
from policy.precision.layer import LastInput, QuantizedLinear, flatten_rows
from policy.precision.nvfp4 import E4M3_MAX

SMALLEST = torch.finfo(torch.float32).tiny
FAST_ACCUMULATION = True
"""Let Hopper accumulate within tensor cores only, 13 bits after the point of the largest product.

On an H200 large products are 8 to 31 % faster than with partial sums in float32. Their error is 0.2
to 0.3 %, instead of the 0.17 % of rounding to bfloat16; FP8's own rounding error is 3.7 %. No
effect on a CPU.
"""

CPU_ROWS = (2, 13)
"""First torch version whose FP8 product supports row-wise scales on a CPU."""


def row_scales(x: Tensor) -> Tensor:
    """Return max|row| / 448 of x [M, K]: float32 [M, 1], at least the smallest normal number."""
    # not 0, so that the codes of a zero row are 0 and not NaN
    return (x.abs().amax(-1, keepdim=True).float() / E4M3_MAX).clamp(min=SMALLEST)


def quantize_rows(x: Tensor, scales: Tensor) -> Tensor:
    """Return e4m3(x * (1 / s)), saturating: float8_e4m3fn [M, K]. A non-finite row gives NaN."""
    return (x.float() * scales.reciprocal()).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


class Activations:
    """Cache of the codes and scales of the last input, shared by the layers that read it."""

    def __init__(self) -> None:
        self._last = LastInput()

    def quantized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes float8_e4m3fn [rows, K] and scales float32 [rows, 1] of x [..., K]."""
        return self._last.get_or_compute(x, self._quantize)

    @staticmethod
    def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = flatten_rows(x)
        if kernels.missing(x.device) is None:
            return kernels.fp8_pack(rows)
        scales = row_scales(rows)
        return quantize_rows(rows, scales), scales


class FP8Linear(QuantizedLinear):
    """Linear layer x [..., K] -> [..., N] in x's dtype.

    Buffers: ``codes`` uint8 [N, K], the bits of E4M3; ``scales`` float32 [N].
    """

    float32_buffers = ("scales",)
    codes: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear, activations: Activations) -> None:
        super().__init__(linear)
        self.add_buffer(linear, "codes", (self.out_features, self.in_features), torch.uint8)
        self.add_buffer(linear, "scales", (self.out_features,), torch.float32)
        self.activations = activations

    def forward(self, x: Tensor) -> Tensor:
        """Return (codes_x codes_w^T) s_x s_w^T + bias, rounded to bfloat16 once."""
        codes, scales = self.activations.quantized(x)
        y = torch._scaled_mm(
            codes,
            # the kernel needs a column-major second operand: the transpose of the row-major codes
            self.codes.view(torch.float8_e4m3fn).t(),
            scale_a=scales,
            scale_b=self.scales.view(1, -1),
            bias=None if self.bias is None else self.bias.to(torch.bfloat16),
            out_dtype=torch.bfloat16,
            use_fast_accum=FAST_ACCUMULATION and x.is_cuda,
        )
        return self.shaped(y, x)


class FP8(Backend):
    """The backend ``fp8``. Its wire format ``fp8``, version 1, is the two buffers of the layer."""

    name = wire_format = "fp8"
    bits = 8
    fuses = packs_eagerly = True
    auto_on = "cuda"
    capability = (8, 9)
    speedup = 2

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Return why FP8 does not run on this device, or None if it does.

        It needs a GPU of compute capability 8.9 or higher, or a CPU with torch 2.13 or later.
        """
        if device.type == "cpu":
            if torch_release() >= CPU_ROWS:
                return None
            return (
                f"on a CPU torch {torch.__version__} supports one scale per tensor only, not per"
                " row"
            )
        if device.type != "cuda":
            return "it runs on CUDA GPUs and CPUs only"
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        capability = torch.cuda.get_device_capability(device)
        return (
            None
            if capability >= self.capability
            else (
                "FP8 needs compute capability 8.9, but this GPU has"
                f" {capability[0]}.{capability[1]}"
            )
        )

    def unsupported_reason(self, rows: int, columns: int) -> str | None:
        """Return why it cannot be quantized: the kernel needs both sizes in multiples of 16."""
        # the same on a CPU: a learner there packs for GPUs and must quantize the same layers
        for letter, size in (("K", columns), ("N", rows)):
            if size % 16:
                return f"{letter} = {size} is not a multiple of 16"
        return None

    def replacements(self, activation_amax: str) -> Callable[[nn.Linear], QuantizedLinear]:
        """Return a function to layers that share the quantized input.

        Ignores ``activation_amax``, as every row has its own scale.
        """
        activations = Activations()
        return lambda linear: FP8Linear(linear, activations)

    def amax(self, weight: Tensor) -> Tensor:
        """Return max|row|: float32 [N, 1]."""
        return weight.detach().abs().amax(-1, keepdim=True).float()

    def pack(self, weight: Tensor, search: bool, amax: Tensor | None = None) -> dict[str, Tensor]:
        """Return codes and scales; ``search`` has no effect. Raises ValueError if not finite."""
        # with E4M3's three mantissa bits a search among neighboring scales is not worthwhile
        exact = weight.detach().float()
        own = self.amax(exact)
        if not math.isfinite(float(own.max())):
            raise ValueError(f"FP8 cannot pack a weight with amax {float(own.max())}")
        amax = own if amax is None else amax
        scales = (amax / E4M3_MAX).clamp(min=SMALLEST)
        return {"codes": quantize_rows(exact, scales).view(torch.uint8), "scales": scales.flatten()}

    def decode(self, packed: dict[str, Tensor]) -> Tensor:
        """Return the weight that the buffers represent: float32 [N, K]."""
        return packed["codes"].view(torch.float8_e4m3fn).float() * packed["scales"].unsqueeze(-1)

    def changed(self, packed: dict[str, Tensor], before: dict[str, Tensor]) -> Tensor:
        """Return the number of codes that differ."""
        return (packed["codes"] != before["codes"]).sum()
