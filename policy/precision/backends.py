"""Registry of the precision backends of exploring, and their selection."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import groupby

import torch

from configs.backends import BACKENDS as ROWS
from configs.lookup import load_class
from policy.precision import cost, kernels
from policy.precision.base import Backend

_CLASSES: dict[str, type[Backend]] = {name: load_class(row, Backend) for name, row in ROWS.items()}
BACKENDS: dict[str, Backend] = {name: found() for name, found in _CLASSES.items()}


def precision_levels() -> list[tuple[str, ...]]:
    """Return the names of all backends from coarse to fine, grouped by equal precision."""
    rising = sorted(BACKENDS.values(), key=lambda backend: backend.bits)
    return [
        tuple(backend.name for backend in level)
        for _, level in groupby(rising, key=lambda backend: backend.bits)
    ]


def wire_formats() -> dict[str, int]:
    """Return the version of each wire format; ``docs/precision.md`` describes the formats."""
    return {backend.wire_format: backend.wire_version for backend in BACKENDS.values()}


def auto_backends(kind: str) -> tuple[Backend, ...]:
    """Return the backends that "auto" tries on devices of this type, fastest first."""
    place = "cuda" if kind == "cuda" else "cpu"
    return tuple(backend for backend in BACKENDS.values() if backend.auto_on == place)


def resolve_backend(
    name: str,
    device: torch.device | str,
    key: str = "explore.backend",
    compile: bool = False,
    step: Callable[[Backend], cost.Step] | None = None,
    quantized: bool = False,
) -> tuple[Backend, str]:
    """Return (backend, reason) for a configured name; "auto" selects the fastest backend.

    On a GPU "auto" selects the first backend that packs activations by kernels or is compiled
    (``compile``) and whose step, as counted by ``step``, is predicted to be faster than BF16. If
    ``quantized``, it selects the first one that quantizes and runs, faster than BF16 or not.

    Raises ValueError with a one-line message that begins with ``key`` if the name is unknown or
    this device cannot run the backend; there is no fallback.
    """
    device = torch.device(device)
    if name == "auto":
        if quantized and device.type == "cuda":
            return _first_quantized(device)
        return _fastest(device, compile, step)
    if name not in BACKENDS:
        raise ValueError(f"{key}: {name!r} is unknown: use auto, {', '.join(BACKENDS)}")
    refusal = BACKENDS[name].unavailable_reason(device)
    if refusal is not None:
        runs = ", ".join(available_backends(device))
        raise ValueError(
            f"{key}: {name!r} does not run on {device.type} here: {refusal}; use auto, or {runs}"
        )
    return BACKENDS[name], f"{name}: as configured"


def eager_note(backend: Backend, device: torch.device | str, compile: bool) -> str:
    """Return a warning to append to the reason if eager packing may cost the gain, else ""."""
    device = torch.device(device)
    if compile or not backend.packs_eagerly or device.type != "cuda" or not kernels.missing(device):
        return ""
    return (
        "; its activations are packed eagerly, which may cancel the speedup of the format: try"
        " explore.compile = true, and `python -m bench explorer --compile`"
    )


def available_backends(device: torch.device | str) -> tuple[str, ...]:
    """Return the names of all backends that this device can run."""
    device = torch.device(device)
    return tuple(
        name for name, backend in BACKENDS.items() if backend.unavailable_reason(device) is None
    )


def finer_backend(current: str, available: Collection[str], finest: str) -> str | None:
    """Return the next finer backend among ``available``, no finer than ``finest``, or None.

    ``finest`` is the precision of regeneration: a proxy as precise as the regenerated image cannot
    gain from more bits. Raises ValueError if ``current`` or ``finest`` is no backend.
    """
    levels = precision_levels()
    level_of = {name: number for number, names in enumerate(levels) for name in names}
    for name in (current, finest):
        if name not in level_of:
            raise ValueError(
                f"backend {name!r} has no precision level: use one of {', '.join(level_of)}"
            )
    finer = levels[level_of[current] + 1 : level_of[finest] + 1]
    return next((name for names in finer for name in names if name in available), None)


def packing_backend(name: str, device: torch.device | str, quantized: bool = False) -> Backend:
    """Return the backend to pack weights for; "auto" selects one for ``device``.

    Any named backend will do, because packing needs no kernels.
    """
    if name in BACKENDS:
        return BACKENDS[name]
    return resolve_backend(name, device, quantized=quantized)[0]


def _first_quantized(device: torch.device) -> tuple[Backend, str]:
    rejected = []
    for backend in auto_backends(device.type):
        if not backend.quantizes:
            continue
        reason = backend.unavailable_reason(device)
        if reason is None:
            why = f"auto: {backend.name} quantizes, as the packed base (lora.base) requires"
            return backend, "; ".join([why, *rejected])
        rejected.append(f"not {backend.name}: {reason}")
    raise ValueError(
        f"explore.backend: auto: no backend that quantizes runs on {device.type}, as the packed"
        f" base (lora.base) requires: {'; '.join(rejected)}; set lora.base = 'full'"
    )


def _fastest(
    device: torch.device, compile: bool, step: Callable[[Backend], cost.Step] | None
) -> tuple[Backend, str]:
    rejected = []
    for backend in auto_backends(device.type):
        reason = _reason_against(backend, device, compile, step)
        if reason is None:
            break
        rejected.append(f"not {backend.name}: {reason}")
    else:
        raise ValueError(f"auto: no backend runs on {device.type}: {'; '.join(rejected)}")
    if device.type != "cuda":
        return backend, (f"auto: there is no NVFP4 kernel for {device.type}, so NVFP4 is emulated")
    why = "; ".join([f"{backend.name} is the fastest backend that this GPU supports", *rejected])
    return backend, f"auto: {why}"


def _reason_against(
    backend: Backend,
    device: torch.device,
    compile: bool,
    step: Callable[[Backend], cost.Step] | None,
) -> str | None:
    """Return why a backend does not run or is not faster on this device; None if it is."""
    refusal = backend.unavailable_reason(device)
    if refusal is not None or not backend.quantizes or device.type != "cuda":
        return refusal
    missing = None if compile or not backend.packs_eagerly else kernels.missing(device)
    if missing is not None:
        return f"eager packing costs more than the format saves, and {missing}"
    if step is None:
        return None
    name = torch.cuda.get_device_name(device)
    return cost.no_speedup_reason(step(backend), name, backend.wire_format, compile)
