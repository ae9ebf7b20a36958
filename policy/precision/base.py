"""Base class of precision backends; a new backend also needs a row in ``configs/backends.py``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from policy.precision.layer import QuantizedLinear


class Backend(ABC):
    """A precision of exploring: how linears compute, and the format of their published weights.

    Packing does not depend on the device: a learner packs for GPUs that it does not have. Backends
    with the same ``wire_format`` can load each other's published weights.
    """

    name: ClassVar[str]
    wire_format: ClassVar[str]
    wire_version: ClassVar[int] = 1
    """Version of the wire format; increment it when the meaning of its buffers changes."""
    wire_dtype: ClassVar[torch.dtype] = torch.float32
    """Dtype in which adapted but unquantized weights are published."""
    bits: ClassVar[float]
    """Bits per weight: the fewer, the coarser. Equal bits count as equal precision."""
    dtype: ClassVar[torch.dtype | None] = None
    """Dtype in which unquantized parts are loaded; None leaves it to the caller."""
    quantizes: ClassVar[bool] = True
    fuses: ClassVar[bool] = False
    """True if linears that read the same input run as one product."""
    packs_eagerly: ClassVar[bool] = False
    """True if packing activations takes many torch operations before the fast product.

    Unless ``policy.precision.kernels`` or compilation fuses them, the format gains nothing.
    """
    auto_on: ClassVar[Literal["cuda", "cpu"] | None] = None
    """Devices on which "auto" may select it: CUDA GPUs ("cuda") or all others ("cpu")."""
    capability: ClassVar[tuple[int, int]] = (0, 0)
    """Minimum compute capability of a CUDA GPU."""
    speedup: ClassVar[float] = 1.0
    """Ratio of its peak matrix-product rate to that of BF16, on a GPU of this capability.

    Plans use it if ``policy.precision.accelerators`` has no peak for the wire format.
    """

    @abstractmethod
    def unavailable_reason(self, device: torch.device) -> str | None:
        """Return why this backend does not run on this device, or None if it does."""

    @abstractmethod
    def unsupported_reason(self, rows: int, columns: int) -> str | None:
        """Return why a weight [N, K] cannot be quantized, or None; the same on every device."""

    @abstractmethod
    def replacements(self, activation_amax: str) -> Callable[[nn.Linear], QuantizedLinear]:
        """Return a function from a linear to its quantized layer with the buffers of ``pack``.

        Use one such function for all layers of a transformer; they may share memory.
        ``activation_amax`` is "power_of_two", "exact" or "previous_pass"
        (``policy.precision.history``); it applies to backends with one scale for all activations of
        a layer.
        """

    def placeholder_replacements(self) -> Callable[[nn.Linear], QuantizedLinear]:
        """Return a function as ``replacements`` for layers of the same size, which may not run.

        Creating them needs no kernels.
        """
        return self.replacements("power_of_two")

    def amax(self, weight: Tensor) -> Tensor:
        """Return the largest magnitudes that determine a weight's scales: float32 [] or [N, 1]."""
        return weight.detach().abs().max().float()

    @abstractmethod
    def pack(self, weight: Tensor, search: bool, amax: Tensor | None = None) -> dict[str, Tensor]:
        """Return the buffers of a layer with this weight [N, K].

        ``search`` spends time on better scales. ``amax`` replaces that of the weight and must not
        be smaller. Raises ValueError if the weight is not finite.
        """

    @abstractmethod
    def decode(self, packed: dict[str, Tensor]) -> Tensor:
        """Return the weight that packed buffers represent: float32 [N, K]."""

    @abstractmethod
    def changed(self, packed: dict[str, Tensor], before: dict[str, Tensor]) -> Tensor:
        """Return the number of elements whose stored code differs: integer []."""
