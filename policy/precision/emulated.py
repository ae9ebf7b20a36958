"""``emulated_nvfp4``: linear layers with exact NVFP4 arithmetic in float32, on any device.

y = alpha (Ux Uw^T) + bias with Ux, Uw = q * sf of activations and weights, float32 products (exact)
and sums, and no rounding before alpha. A layer holds its weight packed (4.5 bits per element) and
decodes Uw in each forward pass: this costs little compared with the product, and no float32 copy
stays in memory. Inference only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from policy.precision import nvfp4
from policy.precision.history import AmaxHistory, history_for
from policy.precision.layer import LastInput, QuantizedLinear, flatten_rows
from policy.precision.nvfp4 import BLOCK
from policy.precision.packing import NVFP4Packing

ALPHA = 1.0 / (nvfp4.SPAN * nvfp4.SPAN)


class Workspace:
    """Tables and scratch memory shared by the emulated layers of one transformer; not thread-safe.

    Quantizes an input once for all layers that read it. The result of ``quantized`` is overwritten
    by the next call with another input. With ``exact`` the amax of activations is not rounded up to
    a power of two.
    """

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._value = torch.empty(0)
        self._scratch = torch.empty(0, dtype=torch.int32)
        self._last = LastInput()

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the tables of values of packed bytes and of scale bytes on ``device``."""
        if torch.compiler.is_compiling():
            return nvfp4.nibble_values(device), nvfp4.scale_values(device)
        if device not in self._tables:
            self._tables[device] = (nvfp4.nibble_values(device), nvfp4.scale_values(device))
        return self._tables[device]

    def quantized(self, x: Tensor, history: AmaxHistory | None = None) -> tuple[Tensor, Tensor]:
        """Return ``nvfp4.quantize_activation`` of x [..., K]: U [rows, K] and amax [], float32.

        With the ``history`` of its layer, x is quantized by the amax that follows from that.
        """
        return self._last.get_or_compute(x, lambda x: self._quantize(x, history))

    def _quantize(self, x: Tensor, history: AmaxHistory | None) -> tuple[Tensor, Tensor]:
        rows = flatten_rows(x).float()
        if not rows.numel():
            return nvfp4.quantize_activation(rows, self.exact)
        plain = self.exact or torch.compiler.is_compiling() or x.device.type != "cpu"
        if plain or not rows.is_contiguous():
            amax = None if history is None else history.amax(rows.abs())
            return nvfp4.quantize_activation(rows, self.exact, amax)
        return self._quantize_on_cpu(rows, history)

    def _quantize_on_cpu(
        self, rows: Tensor, history: AmaxHistory | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute ``nvfp4.quantize_activation`` in eight passes over reused memory."""
        # reused, because on a CPU new memory pages cost more than the arithmetic
        count, width = rows.numel(), rows.shape[1]
        if self._value.numel() < count:
            self._value, self._scratch = torch.empty(count), torch.empty(count, dtype=torch.int32)
        shape = (count // BLOCK, BLOCK)
        blocks = rows.view(shape)
        value = self._value[:count].view(shape)
        scratch = self._scratch[:count].view(shape)
        # |x|: without the sign bit floats keep their order as integers
        torch.bitwise_and(blocks.view(torch.int32), 0x7FFFFFFF, out=scratch)
        largest = scratch.amax(-1, keepdim=True).view(torch.float32)
        top, known = largest.max(), history is not None and history.known
        own = top.item()
        amax = _power_of_two_above(own) if history is None else history.amax(top).item()
        # outside of this range, and for 0 and NaN, the shortcuts below are not exact
        if not 2.0**-100 < amax < 2.0**100 or not math.isfinite(own):
            return nvfp4.quantize_activation(rows, amax=torch.tensor(amax) if known else None)
        # S_enc is 2688 / amax without rounding, S_enc * fp32(1/6) is 448 / amax, and no block
        # exceeds 448 unless the amax is that of another pass
        scales = largest.mul_(nvfp4.E4M3_MAX / amax)
        if known:
            scales.clamp_(max=nvfp4.E4M3_MAX)
        scales = nvfp4.round_to_mantissa_(scales, bits=3, lowest=-6)
        inverse = scales.mul(nvfp4.SPAN_INVERSE * amax).reciprocal_()
        normal = scales.min().item() >= nvfp4.E4M3_SMALLEST_NORMAL
        if not normal:  # in particular where a scale is 0
            inverse.clamp_(max=nvfp4.FLOAT_MAX)
        torch.mul(blocks, inverse, out=value)
        nvfp4.round_e2m1_(value, scratch, saturate=known or not normal)
        value.mul_(scales)
        return value.view(-1, width), torch.scalar_tensor(amax)


def _power_of_two_above(amax: float) -> float:
    """Return the smallest power of two >= amax; return 0 and non-finite values unchanged."""
    if amax == 0 or not math.isfinite(amax):
        return amax
    mantissa, exponent = math.frexp(amax)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


class EmulatedNVFP4Linear(QuantizedLinear):
    """Linear layer x [..., K] -> [..., N] in x's dtype, with the buffers of ``nvfp4.Packed``."""

    float32_buffers = ("amax",)
    codes: Tensor
    scales: Tensor
    amax: Tensor

    def __init__(
        self, linear: nn.Linear, workspace: Workspace, history: AmaxHistory | None = None
    ) -> None:
        super().__init__(linear)
        self.history = history
        self.add_buffer(linear, "codes", (self.out_features, self.in_features // 2), torch.uint8)
        self.add_buffer(
            linear, "scales", (self.out_features, self.in_features // BLOCK), torch.uint8
        )
        self.add_buffer(linear, "amax", (), torch.float32)
        self.workspace = workspace

    def forward(self, x: Tensor) -> Tensor:
        """Return alpha (Ux Uw^T) + bias."""
        operand, amax = self.workspace.quantized(x, self.history)
        weight = nvfp4.decoded_operand(self.codes, self.scales, *self.workspace.tables(x.device))
        # both operands are small integers times powers of two: products are exact in float32, and
        # only the sums round, as they do in a tensor core
        y = torch.mm(operand, weight.t()).mul_((amax * self.amax) * ALPHA)
        if self.bias is not None:
            y += self.bias
        return self.shaped(y, x)


class EmulatedNVFP4(NVFP4Packing):
    """The backend ``emulated_nvfp4``."""

    name = "emulated_nvfp4"
    auto_on = "cpu"

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Return None: it runs on every device."""
        return None

    def unsupported_reason(self, rows: int, columns: int) -> str | None:
        """Return a reason if K is not a multiple of the block size, else None."""
        return f"K = {columns} is not a multiple of {BLOCK}" if columns % BLOCK else None

    def replacements(self, activation_amax: str) -> Callable[[nn.Linear], QuantizedLinear]:
        """Return a function to layers that share one workspace."""
        workspace, history = Workspace(activation_amax == "exact"), history_for(activation_amax)
        return lambda linear: EmulatedNVFP4Linear(linear, workspace, history(linear))
