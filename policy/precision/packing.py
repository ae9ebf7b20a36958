"""The wire format ``nvfp4``, version 1, of three backends: the fields of ``nvfp4.Packed``."""

from __future__ import annotations

from torch import Tensor

from policy.precision import nvfp4
from policy.precision.base import Backend
from policy.precision.nvfp4 import Packed


class NVFP4Packing(Backend):
    """Base of the NVFP4 backends: packing, which needs no particular device."""

    wire_format = "nvfp4"
    bits = 4.5

    def pack(self, weight: Tensor, search: bool, amax: Tensor | None = None) -> dict[str, Tensor]:
        """Return codes, scales and amax."""
        return dict(vars(nvfp4.quantize(weight, search=search, amax=amax)))

    def decode(self, packed: dict[str, Tensor]) -> Tensor:
        """Return the weight that the buffers represent: float32 [N, K]."""
        return nvfp4.dequantize(Packed(**packed))

    def changed(self, packed: dict[str, Tensor], before: dict[str, Tensor]) -> Tensor:
        """Return the number of 4-bit codes that differ."""
        difference = packed["codes"] ^ before["codes"]
        return ((difference & 15) != 0).sum() + ((difference >> 4) != 0).sum()
