"""``bf16`` and ``fp32``: no quantisation. The naive arm, and the yardstick of the others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Wide:
    """The backend; see ``policy.precision.backends.Backend``. Adapted modules travel merged, in ``dtype``."""

    quantises = False

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = self.wire_format = name
        self.dtype: torch.dtype | None = dtype
        self.wire_dtype = dtype

    def refuses(self, linear: nn.Linear) -> str | None:
        """Every linear."""
        return f"backend {self.name} quantises nothing"

    def replacements(self) -> Callable[[nn.Linear], nn.Module]:
        """Nothing is replaced."""
        return lambda linear: linear

    def pack(self, weight: Tensor, search: bool) -> dict[str, Tensor]:
        """The weight itself."""
        return {"weight": weight.to(self.wire_dtype)}

    def decode(self, packed: dict[str, Tensor]) -> Tensor:
        """float32 [N, K]."""
        return packed["weight"].float()

    def changed(self, packed: dict[str, Tensor], before: dict[str, Tensor]) -> Tensor:
        """How many weights differ."""
        return (packed["weight"] != before["weight"]).sum()
