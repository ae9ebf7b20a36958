"""What a precision backend says about itself. A new one is a row in ``configs/backends.py`` too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from policy.precision.layer import QuantizedLinear


class Backend(ABC):
    """One precision of exploring: what linears run in, and in which form their weights travel.

    Packing needs no particular device: a learner packs for GPUs that it does not have. Backends
    with one ``wire_format`` load each other's published weights.
    """

    name: ClassVar[str]
    wire_format: ClassVar[str]
    wire_version: ClassVar[int] = 1
    """Version of the wire format; raise it when what its buffers mean changes."""
    wire_dtype: ClassVar[torch.dtype] = torch.float32
    """The type in which adapted weights travel that are not quantized."""
    bits: ClassVar[float]
    """Bits per weight: the fewer, the coarser. Equal bits count as equal precision."""
    dtype: ClassVar[torch.dtype | None] = None
    """What unquantized parts are loaded in, None to leave that to the caller."""
    quantizes: ClassVar[bool] = True
    fuses: ClassVar[bool] = False
    """Whether linears that read the same input run as one product."""
    packs_eagerly: ClassVar[bool] = False
    """Whether activations are packed by many operations of torch before a quick product where
    neither ``policy.precision.kernels`` nor compiling makes them few: then nothing is gained.
    """
    auto_on: ClassVar[Literal["cuda", "cpu"] | None] = None
    """Where "auto" may take it: on CUDA GPUs, or on everything else."""
    capability: ClassVar[tuple[int, int]] = (0, 0)
    """The compute capability that a CUDA GPU needs for it."""
    speedup: ClassVar[float] = 1.0
    """Peak of its matrix products over that of BF16, on a GPU of this capability; for plans, where
    ``policy.precision.accelerators`` does not state the peak of the wire format.
    """

    @abstractmethod
    def unavailable(self, device: torch.device) -> str | None:
        """Why this backend does not run on this device, or None when it does."""

    @abstractmethod
    def refuses(self, rows: int, columns: int) -> str | None:
        """Why a weight [N, K] cannot be quantized, or None; the same on every device."""

    @abstractmethod
    def replacements(self, activation_amax: str) -> Callable[[nn.Linear], QuantizedLinear]:
        """A function from a linear to its quantized layer with the buffers of ``pack``.

        The layers of one transformer come from one such function, and may share memory.
        ``activation_amax`` is "power_of_two" or "exact", where a backend has one scale for all
        activations of a layer.
        """

    def blanks(self) -> Callable[[nn.Linear], QuantizedLinear]:
        """``replacements`` whose layers hold as much and need no kernels, but may not run."""
        return self.replacements("power_of_two")

    def amax(self, weight: Tensor) -> Tensor:
        """The largest magnitudes that a weight's scales start from: float32 [] or [N, 1]."""
        return weight.detach().abs().max().float()

    @abstractmethod
    def pack(self, weight: Tensor, search: bool, amax: Tensor | None = None) -> dict[str, Tensor]:
        """Buffers of a layer with this weight [N, K]. ValueError when it is not finite.

        ``search``: spend time on better scales. ``amax`` in place of the weight's own, at least as
        large.
        """

    @abstractmethod
    def decode(self, packed: dict[str, Tensor]) -> Tensor:
        """The weight that packed buffers stand for: float32 [N, K]."""

    @abstractmethod
    def changed(self, packed: dict[str, Tensor], before: dict[str, Tensor]) -> Tensor:
        """Number of elements whose stored code differs: integer []."""
