"""What passes of a denoiser and of a decoder take on a GPU: arithmetic on what is counted.

    seconds = max(sum of multiplications / rates + bytes / bandwidths, kernels * ISSUE)

Products, attention and packing have rates of their own; other operations move bytes, fewer where
blocks are compiled. The rates are shares of what a vendor states, calibrated on one H200
(docs/performance.md has predictions beside measurements); other GPUs are taken to reach the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policy.precision.accelerators import ACCELERATORS, Accelerator, accelerator_of

ISSUE = 25e-6
"""Seconds that Python and torch need for one eager kernel, with the modules around it."""
SUSTAINED = {
    "bf16": 0.76, "fp8": 0.74, "nvfp4": 0.69,
    "attention": 0.61,
    "decode bf16": 0.127, "decode fp32": 0.093,
    "packing": 0.65, "memory": 0.40,
}  # fmt: skip
"""Shares of the vendor's peaks that are reached: of BF16's by attention in heads of 128 numbers and
by decoders, whose FP32 convolutions run in TF32; of the bandwidth by kernels that pack, and by all
else that an eager model runs, of which much is short rows, broadcasts and transposed copies. The
share of NVFP4 has not been measured.
"""
COMPILED = {"bytes": 0.25, "kernels": 0.55, "decoder": 0.49}
"""Of what the eager model moves and launches, what is left where blocks are compiled, but for what
small products move; and of a decoder's seconds. One decoder was measured, in BF16.
"""


@dataclass(frozen=True)
class Rates:
    """Operations and bytes per second that a GPU is taken to reach; ``quantized`` is of products in
    ``form``, which is "bf16" where quantized layers gain nothing.
    """

    form: str
    bf16: float
    quantized: float
    attention: float
    decoding: tuple[float, float]  # in BF16, and in FP32
    packing: float
    memory: float


def rates(
    peak: float, quantized: float, bandwidth: float, form: str, share: float | None = None
) -> Rates:
    """From peaks in TFLOP/s and a bandwidth in TB/s, infinite where it is not known. ``share``: of
    the peaks, what products, attention and decoders reach, in place of ``SUSTAINED``.
    """

    def reached(what: str) -> float:
        return share or SUSTAINED[what]

    full, moved = peak * 1e12, bandwidth * 1e12
    return Rates(
        form=form,
        bf16=full * reached("bf16"),
        quantized=quantized * 1e12 * reached(form if form in SUSTAINED else "fp8"),
        attention=full * reached("attention"),
        decoding=(
            full * reached("decode bf16"),
            full * (share / 2 if share else SUSTAINED["decode fp32"]),
        ),
        packing=moved * SUSTAINED["packing"],
        memory=moved * SUSTAINED["memory"],
    )


def rates_of(accelerator: Accelerator, form: str) -> Rates | None:
    """Of a GPU that is known; None where it has no tensor cores for the format."""
    peak = accelerator.peak(form)
    return None if peak is None else rates(accelerator.bf16, peak, accelerator.bandwidth, form)


@dataclass(frozen=True)
class Packing:
    """Packing one input: kernels, and bytes that they read and write per bfloat16 element."""

    kernels: int
    bytes: float


EAGER = {"fp8": Packing(10, 33.01), "nvfp4": Packing(64, 172.75)}
FUSED = {"fp8": Packing(1, 3.0), "nvfp4": Packing(2, 4.69)}
"""By wire format, as ``python -m bench packing`` counts them; a test compares them."""


@dataclass(frozen=True)
class Step:
    """One pass of a model: ``flops``, two per multiplication and addition, ``quantized`` of them in
    quantized layers, which read ``inputs`` tensors of ``elements`` in all; ``kernels`` and
    ``bytes`` of the unquantized model run eagerly, the bytes without those of large products;
    ``small`` of them are those of products that wait for memory.

    ``attention`` of the operations are those of attention, which takes as long as for ``heads``
    operations in heads of 128 numbers.
    """

    flops: float = 0
    quantized: float = 0
    inputs: int = 0
    elements: float = 0
    kernels: int = 0
    bytes: float = 0
    small: float = 0
    attention: float = 0
    heads: float = 0


def seconds(step: Step, at: Rates, fused: bool = True, compiled: bool = False) -> float:
    """What the step takes in ``at.form``, with inputs packed by kernels (``fused``) or by torch."""
    plain, spared = step.flops - step.attention, step.bytes - step.small
    busy = step.heads / at.attention
    busy += (step.small + spared * (COMPILED["bytes"] if compiled else 1.0)) / at.memory
    kernels = step.kernels * (COMPILED["kernels"] if compiled else 1.0)
    if at.form == "bf16":
        busy += plain / at.bf16
    else:
        busy += (plain - step.quantized) / at.bf16 + step.quantized / at.quantized
        packing = (FUSED if fused or compiled else EAGER).get(at.form, Packing(0, 0.0))
        busy += step.elements * packing.bytes / at.packing
        kernels += step.inputs * packing.kernels
    return max(busy, kernels * ISSUE)


def speed(
    step: Step, accelerator: Accelerator, wire_format: str, fused: bool, compiled: bool = False
) -> float | None:
    """How many times as fast as BF16, compiled too if it is, the step should be.

    None where nothing is known of the format, or the accelerator has no tensor cores for it.
    """
    if wire_format == "bf16":
        return 1.0
    full, quick = rates_of(accelerator, "bf16"), rates_of(accelerator, wire_format)
    if wire_format not in FUSED or full is None or quick is None:
        return None
    bf16 = seconds(step, full, compiled=compiled)
    return bf16 / seconds(step, quick, fused, compiled)


def slower(step: Step, name: str, wire_format: str, compiled: bool = False) -> str | None:
    """Why a format is no gain on the GPU called ``name`` even with a fused packing.

    None where it is one, or nothing is known of that GPU or format.
    """
    accelerator = accelerator_of(name)
    if accelerator is None:
        return None
    found = speed(step, accelerator, wire_format, fused=True, compiled=compiled)
    if found is None or found > 1.0:
        return None
    return f"a step is predicted to run at {found:.2f} times the speed of BF16 on {name}"


FORMS = (("eager", False, False), ("by kernels", True, False), ("compiled", True, True))
"""How activations are packed: by torch, by kernels, by kernels in compiled blocks."""


def table(
    steps: dict[str, Step], accelerators: Sequence[str] = tuple(ACCELERATORS)
) -> list[list[str]]:
    """Rows of text with a header: per accelerator and model the predicted speed against BF16,
    which is compiled too in the columns that are.
    """
    columns = [(wire, fused, compiled) for wire in FUSED for _, fused, compiled in FORMS]
    header = [f"{wire} {how}" for wire in FUSED for how, *_ in FORMS]
    rows = [["GPU", "model", *header]]
    for name in accelerators:
        for model, step in steps.items():
            found = [speed(step, ACCELERATORS[name], *column) for column in columns]
            rows.append([name, model, *("" if s is None else f"{s:.2f}" for s in found)])
    return rows
