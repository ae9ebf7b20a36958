"""Backends of the exploring denoiser, by name: what its linears run in, and in which form their weights travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from policy.precision.emulated import EmulatedNVFP4
from policy.precision.wide import Wide


class Backend(Protocol):
    """One precision of exploring.

    ``dtype`` is what unquantised parts are loaded in, None to leave that to the caller; ``wire_dtype`` is that of weights that
    travel wide. Two backends with one ``wire_format`` load each other's published weights.
    """

    @property
    def name(self) -> str: ...
    @property
    def wire_format(self) -> str: ...
    @property
    def quantises(self) -> bool: ...
    @property
    def dtype(self) -> torch.dtype | None: ...
    @property
    def wire_dtype(self) -> torch.dtype: ...

    def refuses(self, linear: nn.Linear) -> str | None:
        """Why this layer cannot be quantised, or None when it can."""
        ...

    def replacements(self) -> Callable[[nn.Linear], nn.Module]:
        """A function from a linear to its quantised layer, whose buffers carry the names that ``pack`` uses.

        The layers of one transformer come from one such function, and may share memory.
        """
        ...

    def pack(self, weight: Tensor, search: bool) -> dict[str, Tensor]:
        """Buffers of a layer with this weight [N, K]; ``search``: spend time on better scales. ValueError when not finite."""
        ...

    def decode(self, packed: dict[str, Tensor]) -> Tensor:
        """The weight that packed buffers stand for: float32 [N, K]."""
        ...

    def changed(self, packed: dict[str, Tensor], before: dict[str, Tensor]) -> Tensor:
        """Number of elements whose stored code differs: integer []."""
        ...


BACKENDS: dict[str, Backend] = {
    "emulated_nvfp4": EmulatedNVFP4(),
    "bf16": Wide("bf16", torch.bfloat16),
    "fp32": Wide("fp32", torch.float32),
}


def resolve_backend(name: str, device: torch.device | str) -> tuple[Backend, str]:
    """The backend of this name on this device, and why; "auto" takes the best that the device supports.

    Raises ValueError for a name that is not available.
    """
    kind = torch.device(device).type
    if name == "auto":
        return BACKENDS["emulated_nvfp4"], f"auto: there is no NVFP4 kernel for {kind} here, so its arithmetic is emulated"
    if name not in BACKENDS:
        raise ValueError(f"explore.backend: {name!r} is not available here: use auto, {', '.join(BACKENDS)}")
    return BACKENDS[name], f"{name}: as configured"
