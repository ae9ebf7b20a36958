"""The precision backends of exploring by name, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import groupby

import torch

from configs.backends import BACKENDS as ROWS
from configs.named import named_class
from policy.precision import cost, kernels
from policy.precision.base import Backend

_CLASSES: dict[str, type[Backend]] = {name: named_class(row, Backend) for name, row in ROWS.items()}
BACKENDS: dict[str, Backend] = {name: found() for name, found in _CLASSES.items()}


def ladder() -> list[tuple[str, ...]]:
    """Names of all backends from coarse to fine; those of one rung have the same precision."""
    rising = sorted(BACKENDS.values(), key=lambda backend: backend.bits)
    return [
        tuple(backend.name for backend in rung)
        for _, rung in groupby(rising, key=lambda backend: backend.bits)
    ]


def wire_formats() -> dict[str, int]:
    """Wire formats and the version of each. ``docs/precision.md`` tells what they mean."""
    return {backend.wire_format: backend.wire_version for backend in BACKENDS.values()}


def auto_backends(kind: str) -> tuple[Backend, ...]:
    """What "auto" tries on devices of this type, quickest first."""
    place = "cuda" if kind == "cuda" else "cpu"
    return tuple(backend for backend in BACKENDS.values() if backend.auto_on == place)


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
    """A warning to put after the reason for ``backend`` where packing may cost its gain, or ""."""
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
    """The next finer backend among ``available``, no finer than ``finest``, or None.

    ``finest`` is the regenerating precision: a proxy that is as precise as what it stands for
    cannot gain by more bits. Raises ValueError for a name that is on no rung.
    """
    steps = ladder()
    rungs = {name: number for number, names in enumerate(steps) for name in names}
    for name in (current, finest):
        if name not in rungs:
            raise ValueError(
                f"backend {name!r} has no precision to compare: one of {', '.join(rungs)} is"
                " expected"
            )
    finer = steps[rungs[current] + 1 : rungs[finest] + 1]
    return next((name for names in finer for name in names if name in available), None)


def packing_backend(name: str, device: torch.device | str) -> Backend:
    """The backend to pack for: any, as packing needs no kernel; "auto" chooses for ``device``."""
    return BACKENDS[name] if name in BACKENDS else resolve_backend(name, device)[0]


def _best(
    device: torch.device, compile: bool, step: Callable[[Backend], cost.Step] | None
) -> tuple[Backend, str]:
    passed_over = []
    for backend in auto_backends(device.type):
        refusal = _no_gain(backend, device, compile, step)
        if refusal is None:
            break
        passed_over.append(f"not {backend.name}: {refusal}")
    else:
        raise ValueError(f"auto: no backend runs on {device.type}: {'; '.join(passed_over)}")
    if device.type != "cuda":
        return backend, (
            f"auto: there is no NVFP4 kernel for {device.type} here, so its arithmetic is emulated"
        )
    why = "; ".join([f"{backend.name} is the quickest that this GPU supports", *passed_over])
    return backend, f"auto: {why}"


def _no_gain(
    backend: Backend,
    device: torch.device,
    compile: bool,
    step: Callable[[Backend], cost.Step] | None,
) -> str | None:
    """Why this backend does not run on this device, or is no gain there; None when it is one."""
    refusal = backend.unavailable(device)
    if refusal is not None or not backend.quantizes or device.type != "cuda":
        return refusal
    missing = None if compile or not backend.packs_eagerly else kernels.missing(device)
    if missing is not None:
        return f"packing eagerly costs more than the format gains, and {missing}"
    if step is None:
        return None
    name = torch.cuda.get_device_name(device)
    return cost.slower(step(backend), name, backend.wire_format, compile)
