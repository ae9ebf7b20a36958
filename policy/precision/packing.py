"""The wire format ``nvfp4``, version 1: ``codes``, ``scales``, ``amax`` as in ``nvfp4.Packed``.
Three backends load it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from policy.precision import nvfp4
from policy.precision.nvfp4 import Packed


class NVFP4Packing:
    """The packing side of a backend, which needs no device; see
    ``policy.precision.backends.Backend``.
    """

    wire_format = "nvfp4"
    quantises = True
    wire_dtype = torch.float32
    fuses = packs_eagerly = False

    def amax(self, weight: Tensor) -> Tensor:
        """max|W|: []."""
        return weight.detach().abs().max().float()

    def pack(self, weight: Tensor, search: bool, amax: Tensor | None = None) -> dict[str, Tensor]:
        """codes, scales, amax."""
        return dict(vars(nvfp4.quantise(weight, search=search, amax=amax)))

    def decode(self, packed: dict[str, Tensor]) -> Tensor:
        """float32 [N, K]."""
        return nvfp4.dequantise(Packed(**packed))

    def changed(self, packed: dict[str, Tensor], before: dict[str, Tensor]) -> Tensor:
        """How many four-bit codes differ."""
        difference = packed["codes"] ^ before["codes"]
        return ((difference & 15) != 0).sum() + ((difference >> 4) != 0).sum()
