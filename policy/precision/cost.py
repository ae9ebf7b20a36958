"""What a step of the denoiser should take on a GPU in each precision: arithmetic, no measurement.

    seconds = max(multiplications / rate + bytes / bandwidth, kernels * ISSUE)

Multiplications in quantised layers run at the format's rate, all others at BF16's. Bytes are those
that the other operations of the model read and write eagerly, the same in every precision, and what
packing moves. A process issues one kernel per ISSUE seconds at best. No GPU has confirmed this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policy.precision.accelerators import ACCELERATORS, Accelerator, accelerator_of

ISSUE = 6e-6
"""Seconds that Python and torch need to issue one eager kernel."""
SUSTAINED = {"bf16": 0.7, "fp8": 0.6, "nvfp4": 0.56, "memory": 0.8}
"""Shares of the vendor's peaks that large products and copies are taken to reach."""


def rate(accelerator: Accelerator, wire_format: str) -> float | None:
    """Operations per second that products in this format are taken to reach; None where it has no
    such tensor cores.
    """
    peak = accelerator.peak(wire_format)
    return None if peak is None else peak * 1e12 * SUSTAINED[wire_format]


@dataclass(frozen=True)
class Packing:
    """Packing one input: kernels, and bytes that they read and write per bfloat16 element."""

    kernels: int
    bytes: float


EAGER = {"fp8": Packing(9, 33.0), "nvfp4": Packing(64, 172.75)}
FUSED = {"fp8": Packing(1, 3.0), "nvfp4": Packing(2, 4.69)}
"""By wire format, as ``python -m bench packing`` counts them; a test compares them."""


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


def seconds(
    step: Step, accelerator: Accelerator, wire_format: str, packing: Packing | None
) -> float | None:
    """What the step takes; without ``packing`` that of the unquantized model.

    None where the accelerator has no tensor cores for the format.
    """
    full, memory = rate(accelerator, "bf16"), accelerator.bandwidth * 1e12 * SUSTAINED["memory"]
    assert full is not None
    if packing is None:
        busy = step.flops / full + step.bytes / memory
        return max(busy, step.kernels * ISSUE)
    quick = rate(accelerator, wire_format)
    if quick is None:
        return None
    arithmetic = (step.flops - step.quantised) / full + step.quantised / quick
    moved = step.bytes + step.elements * packing.bytes
    kernels = step.kernels + step.inputs * packing.kernels
    return max(arithmetic + moved / memory, kernels * ISSUE)


def speed(step: Step, accelerator: Accelerator, wire_format: str, fused: bool) -> float | None:
    """How many times as fast as BF16 the step should be.

    None where nothing is known of the format, or the accelerator has no tensor cores for it.
    """
    if wire_format == "bf16":
        return 1.0
    packing = (FUSED if fused else EAGER).get(wire_format)
    if packing is None:
        return None
    quick = seconds(step, accelerator, wire_format, packing)
    bf16 = seconds(step, accelerator, "bf16", None)
    return None if quick is None or bf16 is None else bf16 / quick


def slower(step: Step, name: str, wire_format: str) -> str | None:
    """Why a format is no gain on the GPU called ``name`` even with a fused packing.

    None where it is one, or nothing is known of that GPU or format.
    """
    accelerator = accelerator_of(name)
    found = None if accelerator is None else speed(step, accelerator, wire_format, fused=True)
    if found is None or found > 1.0:
        return None
    return f"a step is predicted to run at {found:.2f} times the speed of BF16 on {name}"


def table(
    steps: dict[str, Step], accelerators: Sequence[str] = tuple(ACCELERATORS)
) -> list[list[str]]:
    """Rows of text with a header: per accelerator and model the predicted speed against BF16,
    packing eagerly and by kernels.
    """
    columns = [(form, fused) for form in FUSED for fused in (False, True)]
    header = [f"{form} {'by kernels' if fused else 'eager'}" for form, fused in columns]
    rows = [["GPU", "model", *header]]
    for name in accelerators:
        for model, step in steps.items():
            found = [speed(step, ACCELERATORS[name], form, fused) for form, fused in columns]
            rows.append([name, model, *("" if s is None else f"{s:.2f}" for s in found)])
    return rows
