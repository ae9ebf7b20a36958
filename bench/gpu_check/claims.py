"""The claims of docs/gpu.md and their verdicts: confirmed, refuted, or not checkable here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bench.gpu_check.findings import Finding, Results
from bench.gpu_check.passes import MOST

Said = Literal["confirmed", "refuted", "not checkable here"]
FP8, NVFP4 = "tests/policy/test_fp8.py", "tests/policy/test_nvfp4_hardware.py"
GOAL = 0.8
"""Share of the arithmetic bound on speed that a step with ``fp8`` should reach on H200."""
PREDICTION, PLAN, ROUNDING = 0.15, 0.10, 0.05
"""Relative tolerances of a predicted speed, a planned peak, and a compiled against an eager step.

The last is a norm over a whole step: rounding to 8 mantissa bits in about a hundred layers.
"""
EXTRA = 1.5
"""Maximum time of a packing kernel relative to copying the same number of bytes."""
MOVING = 1.25
"""Maximum time of moving weights off a GPU, or back, relative to the plan."""
LEFT = 0.02
"""Maximum share of the moved weights' memory that may still be allocated on the GPU."""
GRADIENT = 0.05
"""Maximum relative distance, as a norm, of a gradient in BF16 from that in FP32.

Small models on a CPU are 0.7 to 1.7 % off; a wrong kernel is off by 100 %.
"""
PUBLISHING = 1.5
"""Maximum time of packing a changed version of FLUX.1 and loading it, relative to the plan."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on a claim; ``why`` is what was measured, or what is missing."""

    said: Said
    why: str


PUBLISHED = "published weights"

Check = Callable[[Results], Verdict]


def not_checkable(why: str) -> Verdict:
    """Return the verdict that the claim cannot be checked on this machine."""
    return Verdict("not checkable here", why)


def verdict(results: Results, check: Check) -> Verdict:
    """Return the verdict of a check; without a GPU it can be a refutation but no confirmation."""
    result = check(results)
    return (
        not_checkable("there is no GPU") if not results.gpu and result.said != "refuted" else result
    )


def needs(what: str) -> Check:
    """Return a check for a claim that cannot be decided on one GPU and needs ``what``."""
    return lambda results: not_checkable(f"needs {what}")


def decide(findings: list[Finding], holds: Callable[[Finding], bool]) -> Verdict:
    """Return confirmed if ``holds`` is true of all findings, refuted by the first counterexample.

    Without findings the claim is not checkable here.
    """
    if not findings:
        return not_checkable("it was not measured")
    against = [each for each in findings if not holds(each)]
    shown = against[:1] or findings
    why = "; ".join(f"{each.what}: {each.value:.3g} {each.unit}" for each in shown[:4])
    return Verdict("refuted" if against else "confirmed", why)


# ---- by section


def tests(*files: str, capability: tuple[int, int] = (0, 0), engine: bool = False) -> Check:
    """Return a check that the files' tests marked ``gpu`` pass.

    They need a GPU of at least this compute capability, and TransformerEngine if ``engine``.
    """

    def check(results: Results) -> Verdict:
        available = str(results.machine.get("capability", "0.0")).split(".")
        if results.gpu and tuple(int(part) for part in available) < capability:
            return not_checkable(f"needs compute capability {capability[0]}.{capability[1]}")
        if engine and not results.machine.get("transformer_engine"):
            return not_checkable("needs TransformerEngine")
        ran = [each for file in files for each in results.findings("tests", file=file)]
        failed = [each for each in ran if each.value]
        if failed:
            return Verdict("refuted", f"{failed[0].what}: {failed[0].note}")
        if len(ran) < len(files):
            return not_checkable("its tests did not run")
        return Verdict("confirmed", f"{sum(each.beside['passed'] for each in ran):.0f} tests pass")

    return check


def bits(results: Results) -> Verdict:
    """Check the bits of the packing kernels.

    Without a GPU it can be refuted too: Triton's interpreter should give the same bits.
    """
    return decide(results.findings("kernels", kind="bits"), lambda each: each.value == 0)


def compiles(results: Results) -> Verdict:
    """Check that every measured backend compiled, with the eager result up to rounding."""
    findings = results.findings("steps", form="compiled")
    return decide(findings, lambda each: each.beside["apart"] < ROUNDING)


def auto(results: Results) -> Verdict:
    """Check that "auto" chooses the fastest backend, within the tolerance of predictions."""
    findings = results.findings("steps", form="auto")
    return decide(findings, lambda each: each.value >= 1 - PREDICTION)


def near_the_bound(results: Results) -> Verdict:
    """Check the speed of FP8 in its fastest form on an H200."""
    if "H200" not in str(results.machine.get("gpu")):
        return not_checkable("needs an H200")
    best: dict[str, Finding] = {}
    for each in results.findings("steps", backend="fp8"):
        name = each.labels["architecture"]
        if each.labels["form"] != "auto" and (name not in best or each.value > best[name].value):
            best[name] = each
    return decide(list(best.values()), lambda each: each.value >= GOAL * each.beside["bound"])


def packing(results: Results) -> Verdict:
    """Check that packing kernels are about as fast as copying the same number of bytes."""
    findings = results.findings("kernels", kind="time")
    return decide(findings, lambda each: each.value <= EXTRA * each.beside["expected"])


def peaks(results: Results) -> Verdict:
    """Check that every memory peak is near the planned one."""
    return decide(results.findings("memory"), lambda each: abs(each.value - 1) <= PLAN)


def predicted(results: Results) -> Verdict:
    """Check that the speed of every eager step is near the predicted one."""
    findings = [
        each
        for form in ("packed by torch", "by kernels")
        for each in results.findings("steps", form=form)
        if "predicted" in each.beside
    ]
    return decide(
        findings, lambda each: abs(each.value / each.beside["predicted"] - 1) <= PREDICTION
    )


def passes(results: Results) -> Verdict:
    """Check the cost of regenerating and training relative to the bare denoiser's passes."""
    if not results.gpu:  # small models on a CPU are not representative
        return not_checkable("there is no GPU")
    findings = [each for form in MOST for each in results.findings("lora", form=form)]
    return decide(findings, lambda each: each.value <= MOST[each.labels["form"]])


def compiled_training(results: Results) -> Verdict:
    """Check the gradients of compiled training, and its gain against the predicted one.

    On a GPU without a prediction it can be refuted, but not confirmed.
    """

    def holds(each: Finding) -> bool:
        same = each.beside["apart"] <= GRADIENT
        return same and each.value >= (1 - PREDICTION) * each.beside["predicted"]

    findings = results.findings("compiled")
    return decide(
        [
            each
            for each in findings
            if "predicted" in each.beside or each.beside["apart"] > GRADIENT
        ],
        holds,
    )


def gradients(results: Results) -> Verdict:
    """Check the learner's gradients; no claim is made about torch's own choice of attention."""
    findings = results.findings("gradients", form="as trained")
    return decide(findings, lambda each: each.value <= GRADIENT)


def decoding(results: Results) -> Verdict:
    """Refute the claim if decoding is not faster; how images rank cannot be checked here."""
    slow = [each for each in results.findings("decode") if each.value <= 1.0]
    if results.gpu and slow:
        return decide(slow, lambda each: False)
    return not_checkable(f"it is faster; that it ranks as well needs {PUBLISHED}")


def leaving(results: Results) -> Verdict:
    """Check moving weights: bits are equal, memory is released, times are those of the plan."""
    bits = results.findings("turns", form="bits")
    if not results.gpu:  # moved from host memory to host memory: only the bits are meaningful
        return decide(bits, lambda each: each.value == 0)
    ways = [each for way in ("back", "out") for each in results.findings("turns", form=way)]
    behind = results.findings("turns", form="left behind")

    def holds(each: Finding) -> bool:
        if each in ways:
            return each.value <= MOVING * each.beside["expected"]
        return each.value <= (LEFT if each in behind else 0)

    return decide([*ways, *behind, *bits], holds)


def quick_to_publish(results: Results) -> Verdict:
    """Check the time to pack a changed version of FLUX.1 and to load it, without the transfer."""
    if not results.gpu:
        return not_checkable("there is no GPU")
    measured, planned = dict[str, float](), dict[str, float]()
    for form in ("packing the next version", "loading"):
        for each in results.findings("weights", form=form):
            name = each.labels["format"]
            measured[name] = measured.get(name, 0.0) + each.value
            planned[name] = planned.get(name, 0.0) + each.beside["planned s"]
    findings = [
        Finding(f"{name}, packed and loaded / planned", seconds / planned[name], "x")
        for name, seconds in measured.items()
    ]
    return decide(findings, lambda each: each.value <= PUBLISHING)


BLACKWELL = (10, 0)
RUN = "a training run on GPUs, with Ray"
CLAIMS: dict[str, Check] = {
    "`fp8` layers compute the product of their dequantized operands": tests(FP8, capability=(8, 9)),
    "`torch_nvfp4` layers equal the emulation": tests(NVFP4, capability=BLACKWELL),
    '`te_nvfp4` layers (`explore.activation_amax = "exact"`) equal the emulation': tests(
        NVFP4, capability=BLACKWELL, engine=True
    ),
    "an image's latents do not depend on the other images of its batch": tests(
        FP8, NVFP4, capability=(8, 9)
    ),
    "the Triton kernels that pack activations and weights give the bits of the eager functions": (
        bits
    ),
    "new weights are loaded in place, so a captured CUDA graph stays valid": tests(
        NVFP4, capability=BLACKWELL
    ),
    "`torch.compile` works with every backend and gives the eager images up to rounding": compiles,
    "`auto` takes the best backend of the GPU": auto,
    (
        "a rollout actor and the learner on GPUs of one kind compute equal bits from the same"
        " packed weights"
    ): needs(RUN),
    (
        "on H200, a step with `fp8` reaches at least 80 % of the bound (a goal, not a result)"
    ): near_the_bound,
    (
        "packing by kernels moves the bytes that"
        " [performance.md](performance.md#what-packing-costs) counts, and takes little"
        " of a step"
    ): packing,
    "peak memory of an actor is what `sol-rl plan` predicts": peaks,
    (
        "weights that leave a GPU between turns come back bit for bit, leave nothing behind, and"
        " take as long as `sol-rl plan` predicts"
    ): leaving,
    (
        "a process stays within its share of a GPU's memory; a full GPU and missing CUDA are each"
        " reported in one line"
    ): needs(RUN),
    "gradients in BF16 are those of FP32 up to rounding, in every family": gradients,
    "the predicted seconds of a step, by which `auto` chooses": predicted,
    (
        "regenerating takes at most 10 % and training at most 25 % longer than the passes of the"
        " bare model"
    ): passes,
    (
        "compiled training (`optimizer.compile`) has the eager gradients up to rounding and is as"
        " fast as `sol-rl plan` predicts"
    ): compiled_training,
    "decoding proxies in BF16 or with a tiny decoder ranks as well and is faster": decoding,
    "seconds of `sol-rl plan`": needs(RUN),
    "exploring in 4 or 8 bits makes an iteration shorter": needs(RUN),
    (
        "`explore_ahead = 1` makes an iteration as long as its longer part where rollout actors"
        " and learner have GPUs of their own"
    ): needs("two GPUs"),
    "packing a version of 12 billion parameters and loading it takes what the plan assumes": (
        quick_to_publish
    ),
    "speed of learned scorers": needs("the scorers' released files"),
    "pool size and faults do not change a bit of the trained weights": needs(RUN),
    "several learners take the steps of one, with NCCL": needs("two GPUs"),
    (
        "a base in shards over learners changes no bit with NCCL, and its memory is what the plan"
        " predicts"
    ): needs("two GPUs"),
    "4-bit proxy images rank the seeds of a large model well enough": needs(PUBLISHED),
    "the published weights of SD3.5, FLUX.1 and SANA load and train": needs(PUBLISHED),
    "SANA's released checkpoint with linear feed-forwards loads": needs("this file"),
    "the released files of the four learned scorers load": needs("these files"),
    "the paper's FLUX.1 table": needs(f"{PUBLISHED}, and days on eight GPUs"),
}
"""Checks by claim: the first column of the table in docs/gpu.md, in order, as a test verifies."""
