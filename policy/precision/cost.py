"""What a step of the denoiser should take on a GPU in each precision: arithmetic, no measurement.

    seconds = max(multiplications / rate + bytes / bandwidth, kernels * ISSUE)

Multiplications in quantised layers run at the format's rate, all others at BF16's. Bytes are those
that the other operations of the model read and write eagerly, the same in every precision, and what
packing moves. A process issues one kernel per ISSUE seconds at best. No GPU has confirmed this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ISSUE = 6e-6
"""Seconds that Python and torch need to issue one eager kernel."""
SUSTAINED = {"bf16": 0.7, "fp8": 0.6, "nvfp4": 0.56, "memory": 0.8}
"""Shares of the vendor's peaks that large products and copies are taken to reach."""


@dataclass(frozen=True)
class Device:
    """Dense peaks as the vendor states them: operations per second, None where there are no such
    tensor cores, and bytes per second.
    """

    bf16: float
    fp8: float | None
    nvfp4: float | None
    memory: float

    def rate(self, what: str) -> float | None:
        """What is taken to be reached of a peak."""
        peak: float | None = getattr(self, what)
        return None if peak is None else peak * SUSTAINED[what]


DEVICES = {
    "GB300": Device(2.5e15, 5e15, 15e15, 8e12),
    "B300": Device(2.25e15, 4.5e15, 14e15, 8e12),
    "GB200": Device(2.5e15, 5e15, 10e15, 8e12),
    "B200": Device(2.25e15, 4.5e15, 9e15, 8e12),
    "H200": Device(0.989e15, 1.979e15, None, 4.8e12),
    "H100": Device(0.989e15, 1.979e15, None, 3.35e12),
    "L40S": Device(0.362e15, 0.733e15, None, 0.864e12),
    "RTX 4090": Device(0.165e15, 0.33e15, None, 1.008e12),
}
"""By a part of the name that CUDA gives; a longer name stands before one that it contains."""


@dataclass(frozen=True)
class Packing:
    """Packing one input: kernels, and bytes that they read and write per bfloat16 element."""

    kernels: int
    bytes: float


EAGER = {"fp8": Packing(9, 33.0), "nvfp4": Packing(64, 172.75)}
FUSED = {"fp8": Packing(1, 3.0), "nvfp4": Packing(2, 4.69)}
"""By wire format, as ``python -m bench.packing`` counts them; a test compares them."""


@dataclass(frozen=True)
class Step:
    """One call of a denoiser: ``flops``, two per multiplication and addition, ``quantised`` of them
    in quantised layers, which read ``inputs`` tensors of ``elements`` in all; ``kernels`` and
    ``bytes`` of the unquantised model, the bytes without those of its matrix products.
    """

    flops: float
    quantised: float
    inputs: int
    elements: float
    kernels: int
    bytes: float


def device_of(name: str) -> Device | None:
    """The device that CUDA calls ``name``, such as "NVIDIA H200"; None for one not listed."""
    return next((device for part, device in DEVICES.items() if part in name), None)


def seconds(step: Step, device: Device, wire_format: str, packing: Packing | None) -> float | None:
    """What the step takes; None where the device has no tensor cores for the format."""
    wide, memory = device.rate("bf16"), device.rate("memory")
    assert wide is not None and memory is not None
    if packing is None:
        busy = step.flops / wide + step.bytes / memory
        return max(busy, step.kernels * ISSUE)
    quick = device.rate(wire_format)
    if quick is None:
        return None
    arithmetic = (step.flops - step.quantised) / wide + step.quantised / quick
    moved = step.bytes + step.elements * packing.bytes
    kernels = step.kernels + step.inputs * packing.kernels
    return max(arithmetic + moved / memory, kernels * ISSUE)


def speed(step: Step, device: Device, wire_format: str, fused: bool) -> float | None:
    """How many times as fast as BF16 the step should be; None where the device has not the
    format.
    """
    if wire_format not in FUSED:
        return 1.0
    quick = seconds(step, device, wire_format, (FUSED if fused else EAGER)[wire_format])
    wide = seconds(step, device, "bf16", None)
    return None if quick is None or wide is None else wide / quick


def slower(step: Step, name: str, wire_format: str) -> str | None:
    """Why a format is no gain on the GPU called ``name`` even with a fused packing; None where it
    is one, or nothing is known of that GPU.
    """
    device = device_of(name)
    found = None if device is None else speed(step, device, wire_format, fused=True)
    if found is None or found > 1.0:
        return None
    return f"a step is predicted to run at {found:.2f} times the speed of BF16 on {name}"


def table(steps: dict[str, Step], devices: Sequence[str] = tuple(DEVICES)) -> list[list[str]]:
    """Rows of text with a header: per device and model the predicted speed against BF16, packing
    eagerly and by kernels.
    """
    columns = [(form, fused) for form in FUSED for fused in (False, True)]
    header = [f"{form} {'by kernels' if fused else 'eager'}" for form, fused in columns]
    rows = [["GPU", "model", *header]]
    for name in devices:
        for model, step in steps.items():
            found = [speed(step, DEVICES[name], form, fused) for form, fused in columns]
            rows.append([name, model, *("" if s is None else f"{s:.2f}" for s in found)])
    return rows
