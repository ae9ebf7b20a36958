"""Cost model of denoiser and decoder passes on a GPU, computed from counted operations.

    seconds = max(sum of multiplications / rates + bytes / bandwidths, kernels * ISSUE)

Matrix products, attention and packing have their own rates; other operations are bound by the bytes
that they move, which are fewer in compiled blocks. The rates are fractions of the vendor's peaks,
calibrated on one H200 (docs/performance.md compares predictions with measurements); other GPUs are
assumed to reach the same fractions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policy.precision.accelerators import ACCELERATORS, Accelerator, accelerator_of

ISSUE = 25e-6
"""Seconds that Python and torch need to issue one eager kernel, including module overhead."""
SUSTAINED = {
    "bf16": 0.76, "fp8": 0.74, "nvfp4": 0.69,
    "attention": 0.61,
    "decode bf16": 0.127, "decode fp32": 0.093,
    "packing": 0.65, "memory": 0.40,
}  # fmt: skip
"""Fractions of the vendor's peaks that are reached.

Attention (in heads of size 128) and decoding are relative to the BF16 peak; the FP32 convolutions
of decoders run in TF32. "packing" (packing kernels) and "memory" (all other eager operations, many
of them on short rows, broadcasts or transposed copies) are relative to the bandwidth. The fraction
of NVFP4 has not been measured.
"""
COMPILED = {"bytes": 0.25, "kernels": 0.55, "decoder": 0.49}
"""Factors by which compilation reduces bytes and kernels of the blocks, and a decoder's seconds.

The bytes of small products are not reduced. One decoder was measured, in BF16.
"""


@dataclass(frozen=True)
class Rates:
    """Operations and bytes per second that a GPU is assumed to reach.

    ``quantized`` is the rate of products in the format ``form``, which is "bf16" if quantized
    layers gain nothing.
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
    """Return the rates for peaks in TFLOP/s and a bandwidth in TB/s.

    The bandwidth is infinite if it is not known. ``share`` is the fraction of the peaks that
    products, attention and decoders reach; it replaces ``SUSTAINED``.
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
    """Return the rates of a listed GPU, or None if it has no tensor cores for the format."""
    peak = accelerator.peak(form)
    return None if peak is None else rates(accelerator.bf16, peak, accelerator.bandwidth, form)


@dataclass(frozen=True)
class Packing:
    """Cost of packing one input: kernels, and bytes read and written per bfloat16 element."""

    kernels: float
    bytes: float


EAGER = {"fp8": Packing(10, 33.01), "nvfp4": Packing(63, 164.75)}
FUSED = {"fp8": Packing(1, 3.0), "nvfp4": Packing(2, 4.69)}
"""Costs by wire format, as counted by ``python -m bench packing``; a test compares them."""
PREVIOUS_PASS = Packing(1, 2.69)
"""Cost of NVFP4 with ``explore.activation_amax = "previous_pass"``, but for the first pass."""


@dataclass(frozen=True)
class Step:
    """Counted cost of one pass of a model.

    ``flops`` has two operations per multiply-add; ``quantized`` of them are in quantized layers,
    which read ``inputs`` tensors with ``elements`` elements in total. ``kernels`` and ``bytes`` are
    those of the unquantized model in eager mode, without the bytes of large products; ``small`` of
    the bytes belong to memory-bound products.

    ``attention`` of the operations are in attention, which takes as long as ``heads`` operations in
    heads of size 128.
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


def packing_of(form: str, fused: bool = True, known: float = 0.0) -> Packing:
    """Return the mean cost of packing an input to ``form``.

    Inputs are packed by kernels if ``fused`` is set, else by torch operations. ``known`` is the
    share of passes in which NVFP4 uses the amax of the previous pass.
    """
    own = (FUSED if fused else EAGER).get(form, Packing(0, 0.0))
    if form != "nvfp4" or not fused or not known:
        return own
    return Packing(
        own.kernels + known * (PREVIOUS_PASS.kernels - own.kernels),
        own.bytes + known * (PREVIOUS_PASS.bytes - own.bytes),
    )


def seconds(
    step: Step, at: Rates, fused: bool = True, compiled: bool = False, known: float = 0.0
) -> float:
    """Return the predicted seconds of a step in the format ``at.form``.

    ``fused`` and ``known`` are as in ``packing_of``; compiled steps pack by kernels.
    """
    products, other = step.flops - step.attention, step.bytes - step.small
    busy = step.heads / at.attention
    busy += (step.small + other * (COMPILED["bytes"] if compiled else 1.0)) / at.memory
    kernels = step.kernels * (COMPILED["kernels"] if compiled else 1.0)
    if at.form == "bf16":
        busy += products / at.bf16
    else:
        busy += (products - step.quantized) / at.bf16 + step.quantized / at.quantized
        packing = packing_of(at.form, fused or compiled, known)
        busy += step.elements * packing.bytes / at.packing
        kernels += step.inputs * packing.kernels
    return max(busy, kernels * ISSUE)


def speed(
    step: Step, accelerator: Accelerator, wire_format: str, fused: bool, compiled: bool = False
) -> float | None:
    """Return the predicted speed of a step relative to BF16, both compiled if ``compiled`` is set.

    Returns None if the format is unknown or the accelerator has no tensor cores for it.
    """
    if wire_format == "bf16":
        return 1.0
    full, quick = rates_of(accelerator, "bf16"), rates_of(accelerator, wire_format)
    if wire_format not in FUSED or full is None or quick is None:
        return None
    bf16 = seconds(step, full, compiled=compiled)
    return bf16 / seconds(step, quick, fused, compiled)


def no_speedup_reason(
    step: Step, name: str, wire_format: str, compiled: bool = False
) -> str | None:
    """Return why a format is no faster than BF16 on the GPU ``name``, even with fused packing.

    Returns None if it is faster, or if the GPU or the format is unknown.
    """
    accelerator = accelerator_of(name)
    if accelerator is None:
        return None
    ratio = speed(step, accelerator, wire_format, fused=True, compiled=compiled)
    if ratio is None or ratio > 1.0:
        return None
    return f"a step is predicted to run at {ratio:.2f} times the speed of BF16 on {name}"


FORMS = (("eager", False, False), ("by kernels", True, False), ("compiled", True, True))
"""(name, fused, compiled) of packing by torch, by kernels, and by kernels in compiled blocks."""


def table(
    steps: dict[str, Step], accelerators: Sequence[str] = tuple(ACCELERATORS)
) -> list[list[str]]:
    """Return rows of text, with a header, of the predicted speed per accelerator and model.

    Speeds are relative to BF16, which is compiled too in the columns with compilation.
    """
    columns = [(wire, fused, compiled) for wire in FUSED for _, fused, compiled in FORMS]
    header = [f"{wire} {how}" for wire in FUSED for how, *_ in FORMS]
    rows = [["GPU", "model", *header]]
    for name in accelerators:
        for model, step in steps.items():
            speeds = [speed(step, ACCELERATORS[name], *column) for column in columns]
            rows.append([name, model, *("" if s is None else f"{s:.2f}" for s in speeds)])
    return rows
