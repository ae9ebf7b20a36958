"""Speed of a step in every backend relative to BF16: packed by torch, by kernels, and compiled."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import nn

from bench.architectures import Case
from bench.explorer import bound, explorer_transformer, one_step, quantizable_share
from bench.gpu_check.findings import Finding, Item, LeftOut
from bench.gpu_check.setting import Setting, free
from bench.timing import Ratio, interleave
from policy.pass_cost import held_bytes
from policy.precision import cost, kernels
from policy.precision.accelerators import accelerator_of
from policy.precision.backends import BACKENDS, Backend, resolve_backend
from policy.precision.compiling import compiled, compiler_missing
from policy.precision.counting import step_of

BATCH, SMALL_BATCH = 8, 2
COMPILING_S = 45.0
"""Minimum remaining seconds to start compiling the blocks of two models."""
REPEATS = (2, 7)
"""Minimum and maximum number of repeats."""
Run = Callable[[], object]


def measure(setting: Setting) -> Iterator[Item]:
    """Measure speed ratios alternately, and add the arithmetic bound and the predicted speed."""
    names = setting.architectures
    for index, name in enumerate(names):
        if setting.left < 15.0 and setting.gpu:
            yield LeftOut(f"{', '.join(names[index:])}", f"{setting.left:.0f} s were left")
            return
        with setting.case(name) as case:
            yield from _architecture(case, setting, setting.left / (len(names) - index))
        free()


def _architecture(case: Case, setting: Setting, seconds: float) -> Iterator[Item]:
    """Measure one architecture in about ``seconds``."""
    # seconds that are reserved for the architectures after this one
    reserved, device = setting.left - seconds, setting.device
    batch = BATCH if setting.gpu else SMALL_BATCH
    speeds: dict[str, float] = {}
    transformer = explorer_transformer(case, BACKENDS["bf16"], device)
    reference = one_step(case, transformer, batch, device)
    memory = held_bytes(transformer)
    quick = setting.quick()
    if not quick:
        yield LeftOut(case.name, "no backend with faster arithmetic than BF16 runs here")
    for backend in quick:
        packed = explorer_transformer(case, backend, device)
        step = one_step(case, packed, batch, device)
        runs: dict[str, Run] = {"bf16": reference, "packed by torch": step}
        if kernels.missing(device) is None:
            runs["packed by torch"] = _by_torch(step)
            runs["by kernels"] = step
        seconds = (setting.left - reserved) / len(quick) if setting.gpu else 0.0
        repeats = 1 if setting.once else _repeats(runs, seconds)
        times = interleave(runs, repeats, warm_up=setting.warm_up)
        beside = _beside(case, backend, batch, held_bytes(packed) / memory)
        for form in list(runs)[1:]:
            finding = _finding(case, backend, form, times, "bf16", beside)
            speeds[backend.name] = finding.value
            yield finding
        if setting.gpu:
            yield from _compiled(case, setting, backend, (transformer, packed), batch, beside)
        else:
            yield LeftOut(f"{case.name} {backend.name}, compiled", "minutes on a CPU")
        del packed, step, runs
        free()
    if setting.gpu:
        yield _auto(case, setting, batch, speeds)


def _compiled(
    case: Case,
    setting: Setting,
    backend: Backend,
    models: tuple[nn.Module, nn.Module],
    batch: int,
    beside: dict[str, float],
) -> Iterator[Item]:
    """Compare BF16 and this backend, both compiled, and the result with that of the eager model."""
    device = setting.device
    missing = compiler_missing(device)
    if missing is None and setting.left < COMPILING_S:
        missing = f"{setting.left:.0f} s were left"
    if missing is not None:
        yield LeftOut(f"{case.name} {backend.name}, compiled", missing)
        return
    full, packed = (compiled(model, device) for model in models)
    both = {
        "bf16 compiled": one_step(case, full, batch, device),
        "compiled": one_step(case, packed, batch, device),
    }
    times = interleave(both, _repeats(both, 10.0), warm_up=1)
    x, sigma, cond = case.inputs(batch, device)
    with torch.no_grad():
        eager, result = (
            case.family.velocity(model, x, sigma, cond) for model in (models[1], packed)
        )
    apart = float((result - eager).norm() / eager.norm())
    yield _finding(case, backend, "compiled", times, "bf16 compiled", {**beside, "apart": apart})


def _auto(case: Case, setting: Setting, batch: int, speeds: dict[str, float]) -> Finding:
    """Return the speed of the backend that "auto" chooses relative to the fastest measured one."""
    blank = case.build("meta", torch.bfloat16)
    chosen, why = resolve_backend(
        "auto", setting.device, step=lambda backend: step_of(case.family, blank, backend, batch)
    )
    known = {"bf16": 1.0, **speeds}
    return Finding(
        f"{case.name}, backend of auto / fastest backend",
        known.get(chosen.name, 1.0) / max(known.values()),
        "x",
        {"architecture": case.name, "backend": chosen.name, "form": "auto"},
        note=why,
    )


def _by_torch(step: Run) -> Run:
    """Return ``step`` with activations packed by torch's operations, as without Triton."""

    def run() -> None:
        with mock.patch.object(kernels, "missing", lambda device: "without it"):
            step()

    return run


def _repeats(runs: dict[str, Run], seconds: float) -> int:
    """Return the number of repeats, within ``REPEATS``, that half of ``seconds`` allows."""
    if not seconds:
        return REPEATS[0]
    once = sum(values[0] for values in interleave(runs, 1, warm_up=1).values())
    low, high = REPEATS
    return max(low, min(high, int(seconds / 2 / max(once, 1e-6))))


def _beside(case: Case, backend: Backend, batch: int, memory: float) -> dict[str, float]:
    """Return the numbers to compare a speed with; ``memory`` is that of the weights over BF16's."""
    share = quantizable_share(case, backend)
    return {
        "bound": bound(share, backend.wire_format),
        "quantizable": share,
        "weights": memory,
        "batch": float(batch),
        **_predicted(case, backend, batch),
    }


def _predicted(case: Case, backend: Backend, batch: int) -> dict[str, float]:
    """Return the predicted speeds by form: eager, with packing kernels, and compiled.

    Empty for a GPU that is not in the list of accelerators.
    """
    if not torch.cuda.is_available():
        return {}
    accelerator = accelerator_of(torch.cuda.get_device_name())
    if accelerator is None:
        return {}
    step = step_of(case.family, case.build("meta", torch.bfloat16), backend, batch)
    speeds = {
        form: cost.speed(step, accelerator, backend.wire_format, fused, compiled)
        for form, fused, compiled in (
            ("predicted eager", False, False),
            ("predicted", True, False),
            ("predicted compiled", True, True),
        )
    }
    return {form: speed for form, speed in speeds.items() if speed is not None}


def _finding(
    case: Case,
    backend: Backend,
    form: str,
    times: dict[str, list[float]],
    base: str,
    beside: dict[str, float],
) -> Finding:
    """Return the speed: the seconds of ``base`` (BF16) over those of this backend's form."""
    ratio = Ratio.of(times, base, form)
    forms = {"packed by torch": "predicted eager", "compiled": "predicted compiled"}
    predicted = forms.get(form, "predicted")
    kept = {name: value for name, value in beside.items() if not name.startswith("predicted")}
    if predicted in beside:
        kept["predicted"] = beside[predicted]
    return Finding(
        f"{case.name} {backend.name}, {form}",
        ratio.value,
        "x BF16",
        {"architecture": case.name, "backend": backend.name, "form": form},
        {
            **kept,
            "low": ratio.low,
            "high": ratio.high,
            "seconds": ratio.base_seconds / beside["batch"],
            "bf16 seconds": statistics.median(times[base]) / beside["batch"],
        },
        "per image and step",
    )
