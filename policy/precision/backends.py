"""Backends of the exploring denoiser, by name: what its linears run in, and in which form their
weights travel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

import torch
from torch import Tensor, nn

from policy.precision import cost, kernels
from policy.precision.emulated import EmulatedNVFP4
from policy.precision.fp8 import FP8
from policy.precision.hardware import EngineNVFP4, TorchNVFP4
from policy.precision.layer import QuantisedLinear
from policy.precision.wide import Wide


class Backend(Protocol):
    """One precision of exploring.

    ``dtype`` is what unquantised parts are loaded in, None to leave that to the caller;
    ``wire_dtype`` is that of weights that travel wide. Packing needs no particular device: a
    learner packs for GPUs that it does not have. Backends with one ``wire_format`` load each
    other's published weights.
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
    @property
    def fuses(self) -> bool:
        """Whether linears that read the same input run as one product."""
        ...

    @property
    def packs_eagerly(self) -> bool:
        """Whether activations are packed by many operations of torch before a quick product, so
        that compiling decides what is gained.
        """
        ...

    def unavailable(self, device: torch.device) -> str | None:
        """Why this backend does not run on this device, or None when it does."""
        ...

    def refuses(self, rows: int, columns: int) -> str | None:
        """Why a weight [N, K] cannot be quantised, or None when it can. A matter of shapes only,
        the same on every device.
        """
        ...

    def replacements(self, activation_amax: str) -> Callable[[nn.Linear], QuantisedLinear]:
        """A function from a linear to its quantised layer, whose ``wire_targets`` carry the names
        that ``pack`` uses.

        The layers of one transformer come from one such function, and may share memory.
        ``activation_amax`` is "power_of_two" or "exact", where a backend has one scale for all
        activations of a layer.
        """
        ...

    def amax(self, weight: Tensor) -> Tensor:
        """The largest magnitudes that the scales of a weight [N, K] start from: float32, [] or one
        per row [N, 1].
        """
        ...

    def pack(self, weight: Tensor, search: bool, amax: Tensor | None = None) -> dict[str, Tensor]:
        """Buffers of a layer with this weight [N, K]. ValueError when it is not finite.

        ``search``: spend time on better scales. ``amax`` in place of the weight's own, at least as
        large.
        """
        ...

    def decode(self, packed: dict[str, Tensor]) -> Tensor:
        """The weight that packed buffers stand for: float32 [N, K]."""
        ...

    def changed(self, packed: dict[str, Tensor], before: dict[str, Tensor]) -> Tensor:
        """Number of elements whose stored code differs: integer []."""
        ...


BACKENDS: dict[str, Backend] = {
    "te_nvfp4": EngineNVFP4(),
    "torch_nvfp4": TorchNVFP4(),
    "fp8": FP8(),
    "emulated_nvfp4": EmulatedNVFP4(),
    "bf16": Wide("bf16", torch.bfloat16),
    "fp32": Wide("fp32", torch.float32),
}
ON_CUDA = ("torch_nvfp4", "fp8", "bf16")
"""What `auto` tries on a GPU, quickest first. Not te_nvfp4: by default its layers are those of
torch_nvfp4.
"""
LADDER = (("te_nvfp4", "torch_nvfp4", "emulated_nvfp4"), ("fp8",), ("bf16",), ("fp32",))
"""From coarse to fine; those of one rung have the same precision."""


def resolve_backend(
    name: str,
    device: torch.device | str,
    key: str = "explore.backend",
    compile: bool = False,
    step: Callable[[Backend], cost.Step] | None = None,
) -> tuple[Backend, str]:
    """The backend of this name on this device, and why; "auto" takes the quickest.

    On a GPU that is the first that packs activations by kernels or is compiled (``compile``), and
    whose step, which ``step`` counts, is predicted to take less time than BF16's.

    Raises ValueError, one line that begins with ``key``, for a name that is unknown or that this
    device cannot run: nothing else is taken in its place.
    """
    device = torch.device(device)
    if name == "auto":
        return _best(device, compile, step)
    if name not in BACKENDS:
        raise ValueError(f"{key}: {name!r} is unknown: use auto, {', '.join(BACKENDS)}")
    refusal = BACKENDS[name].unavailable(device)
    if refusal is not None:
        runs = ", ".join(available_backends(device))
        raise ValueError(
            f"{key}: {name!r} does not run on {device.type} here: {refusal}; use auto, or {runs}"
        )
    return BACKENDS[name], f"{name}: as configured"


def eager_note(backend: Backend, device: torch.device | str, compile: bool) -> str:
    """What to say after the reason for ``backend`` where packing may cost what the format gains;
    nothing where it will not.
    """
    device = torch.device(device)
    if compile or not backend.packs_eagerly or device.type != "cuda" or not kernels.missing(device):
        return ""
    return (
        "; its activations are packed eagerly, which may cost what the format gains: try"
        " explore.compile = true, and `python -m bench explorer --compile`"
    )


def available_backends(device: torch.device | str) -> tuple[str, ...]:
    """Names of all that this device can run."""
    device = torch.device(device)
    return tuple(name for name, backend in BACKENDS.items() if backend.unavailable(device) is None)


def finer_backend(current: str, available: Collection[str], finest: str) -> str | None:
    """The next finer precision than that of ``current`` among ``available``, up to that of
    ``finest``; None: there is none.

    A proxy that is as precise as what it stands for cannot gain by more bits, so ``finest`` is the
    regenerating precision. Raises ValueError for a name that is on no rung.
    """
    rungs = {name: number for number, names in enumerate(LADDER) for name in names}
    for name in (current, finest):
        if name not in rungs:
            raise ValueError(
                f"backend {name!r} has no precision to compare: one of {', '.join(rungs)} is"
                " expected"
            )
    finer = LADDER[rungs[current] + 1 : rungs[finest] + 1]
    return next((name for names in finer for name in names if name in available), None)


def packing_backend(name: str, device: torch.device | str) -> Backend:
    """The backend to pack for: any name, as packing needs no kernel; "auto" is what
    ``resolve_backend`` would take on ``device``.
    """
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"explore.backend: {name!r} is unknown: use auto, {', '.join(BACKENDS)}")
    return BACKENDS[name] if name in BACKENDS else resolve_backend(name, device)[0]


def _best(
    device: torch.device, compile: bool, step: Callable[[Backend], cost.Step] | None
) -> tuple[Backend, str]:
    if device.type != "cuda":
        return (
            BACKENDS["emulated_nvfp4"],
            f"auto: there is no NVFP4 kernel for {device.type} here, so its arithmetic is emulated",
        )
    passed_over = []
    for name in ON_CUDA:
        refusal = _no_gain(BACKENDS[name], device, compile, step)
        if refusal is None:
            break
        passed_over.append(f"not {name}: {refusal}")
    return (
        BACKENDS[name],
        f"auto: {'; '.join([f'{name} is the quickest that this GPU supports', *passed_over])}",
    )


def _no_gain(
    backend: Backend,
    device: torch.device,
    compile: bool,
    step: Callable[[Backend], cost.Step] | None,
) -> str | None:
    """Why this backend does not run on this GPU, or is no gain there; None when it is one."""
    refusal = backend.unavailable(device)
    if refusal is not None or not backend.quantises:
        return refusal
    missing = None if compile or not backend.packs_eagerly else kernels.missing(device)
    if missing is not None:
        return f"packing eagerly costs more than the format gains, and {missing}"
    if step is None:
        return None
    return cost.slower(step(backend), torch.cuda.get_device_name(device), backend.wire_format)
