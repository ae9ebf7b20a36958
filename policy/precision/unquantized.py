"""``bf16`` and ``fp32``: no quantization. The naive arm, and the yardstick of the others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from policy.precision.base import Backend
from policy.precision.layer import QuantizedLinear


class Unquantized(Backend):
    """Adapted modules travel merged, in ``dtype``; every other one is the base model's."""

    quantizes = False

    def unavailable(self, device: torch.device) -> str | None:
        """Runs anywhere."""
        return None

    def refuses(self, rows: int, columns: int) -> str | None:
        """Every layer."""
        return f"backend {self.name} quantizes nothing"

    def replacements(self, activation_amax: str) -> Callable[[nn.Linear], QuantizedLinear]:
        """There are none. Raises ValueError for any layer."""

        def refuse(linear: nn.Linear) -> QuantizedLinear:
            raise ValueError(
                f"backend {self.name} quantizes nothing, so it has no layer in place of {linear}"
            )

        return refuse

    def pack(self, weight: Tensor, search: bool, amax: Tensor | None = None) -> dict[str, Tensor]:
        """The weight itself."""
        return {"weight": weight.to(self.wire_dtype)}

    def decode(self, packed: dict[str, Tensor]) -> Tensor:
        """float32 [N, K]."""
        return packed["weight"].float()

    def changed(self, packed: dict[str, Tensor], before: dict[str, Tensor]) -> Tensor:
        """How many weights differ."""
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
