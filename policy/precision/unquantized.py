"""Backends ``bf16`` and ``fp32`` without quantization: the naive arm and the baseline."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from policy.precision.base import Backend
from policy.precision.layer import QuantizedLinear


class Unquantized(Backend):
    """Base of the unquantized backends: only adapted modules are published, with merged weights."""

    quantizes = False

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Return None: it runs on every device."""
        return None

    def unsupported_reason(self, rows: int, columns: int) -> str | None:
        """Return a reason for every layer, as nothing is quantized."""
        return f"backend {self.name} quantizes nothing"

    def replacements(self, activation_amax: str) -> Callable[[nn.Linear], QuantizedLinear]:
        """Return a function that raises ValueError for any layer, as there are none."""

        def refuse(linear: nn.Linear) -> QuantizedLinear:
            raise ValueError(
                f"backend {self.name} quantizes nothing, so it has no layer to replace {linear}"
            )

        return refuse

    def pack(self, weight: Tensor, search: bool, amax: Tensor | None = None) -> dict[str, Tensor]:
        """Return the weight in ``wire_dtype``."""
        return {"weight": weight.to(self.wire_dtype)}

    def decode(self, packed: dict[str, Tensor]) -> Tensor:
        """Return the weight in float32 [N, K]."""
        return packed["weight"].float()

    def changed(self, packed: dict[str, Tensor], before: dict[str, Tensor]) -> Tensor:
        """Return the number of elements that differ."""
        return (packed["weight"] != before["weight"]).sum()


class BF16(Unquantized):
    """The backend ``bf16``."""

    name = wire_format = "bf16"
    bits = 16
    dtype = wire_dtype = torch.bfloat16
    auto_on = "cuda"


class FP32(Unquantized):
    """The backend ``fp32``."""

    name = wire_format = "fp32"
    bits = 32
    dtype = torch.float32
