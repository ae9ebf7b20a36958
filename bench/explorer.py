"""Benchmark of a denoiser step in each precision, with random weights and without Ray.

Times are those of one call of a published architecture's transformer through its family for a batch
of images, divided by the batch size: seconds per image and step. Each ratio is printed with its
theoretical bound: with a share s of the work in layers that run q times as fast as BF16, the
speedup of a step is at most 1 / (1 - s + s / q) (Amdahl).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.architectures import Case, case_of
from bench.timing import Options, Ratio, interleave
from configs.load import ConfigError
from policy.device import synchronize, threads
from policy.families.architectures import published_names
from policy.pass_cost import denoiser_cost, groups_of, held_bytes
from policy.precision.backends import BACKENDS, Backend, available_backends, resolve_backend
from policy.precision.compiling import compiled, compiler_missing
from policy.precision.swap import quantize_plan, swap_linears, weight_modules


def quantizable_share(case: Case, backend: Backend) -> float:
    """Return the share of a step's multiplications in layers that ``backend`` quantizes.

    It is counted on tensors without data.
    """
    transformer = case.build("meta")
    plan = quantize_plan(transformer, case.family, (), backend)
    work = denoiser_cost(case.family, transformer, 1, torch.float32, groups_of(plan))
    return work.quantized / work.flops


def bound(share: float, wire_format: str) -> float:
    """Return the maximum speedup over BF16 for a share of faster arithmetic (Amdahl).

    It is 1 for formats that are not faster.
    """
    backends = (each for each in BACKENDS.values() if each.wire_format == wire_format)
    return 1.0 / (1.0 - share + share / max(each.speedup for each in backends))


def explorer_transformer(case: Case, backend: Backend, device: torch.device) -> nn.Module:
    """Return the transformer of an explorer, packed from random weights."""
    dtype = backend.dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        transformer = case.build(device, dtype)
    plan = quantize_plan(transformer, case.family, (), backend)
    weights = {
        name: module.weight.detach().flatten(1) for name, module in weight_modules(transformer)
    }
    ranges: dict[str, Tensor] = {}
    for row in plan:
        if row.fused is not None:
            ranges[row.fused] = torch.maximum(
                ranges.get(row.fused, torch.zeros((), device=device)),
                backend.amax(weights[row.name]),
            )
    layers = swap_linears(transformer, plan, backend)
    for row in plan:
        if row.quantized:
            amax = ranges.get(row.fused or "")
            targets = layers[row.name].wire_targets()
            packed = backend.pack(
                weights.pop(row.name), False, amax if amax is None or not amax.ndim else None
            )
            for part, tensor in packed.items():
                targets[part].copy_(tensor)
    for layer in layers.values():
        layer.finish_loading()
    return transformer


def measure(options: Options) -> list[Ratio]:
    """Return the ratio of each backend to BF16, and to FP32 on a CPU, for every architecture.

    Models run eagerly, and also compiled if requested. Raises ConfigError if a backend does not run
    on this device, or if compilation is requested but not possible.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _check(options, device)
    small = options.small if options.small is not None else device.type == "cpu"
    ratios, rollout_threads = [], options.config.services.rollout.threads
    with threads(rollout_threads if device.type == "cpu" else torch.get_num_threads()):
        for name in options.architectures:
            with case_of(name, options.pixels, small) as case:
                ratios += _ratios(case, options, device)
    return ratios


def _check(options: Options, device: torch.device) -> None:
    try:
        for name in options.backends:
            resolve_backend(name, device, "--backends")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    missing = compiler_missing(device) if options.compile else None
    if missing is not None:
        raise ConfigError(f"--compile: {missing}: install it or leave --compile out")


def _ratios(case: Case, options: Options, device: torch.device) -> list[Ratio]:
    names = tuple(
        resolve_backend(name, device)[0].name for name in options.backends
    ) or available_backends(device)
    names = tuple(dict.fromkeys(("bf16", *(("fp32",) if device.type == "cpu" else ()), *names)))
    modes = ("eager", "compiled") if options.compile else ("eager",)
    runs: dict[str, Callable[[], object]] = {}
    memory: dict[str, int] = {}
    peaks: dict[str, int] = {}
    for name in names:
        transformer = explorer_transformer(case, BACKENDS[name], device)
        memory[name] = held_bytes(transformer)
        for mode in modes:
            denoiser = compiled(transformer, device) if mode == "compiled" else transformer
            runs[f"{case.name} {name} {mode}"] = one_step(case, denoiser, options.batch, device)
        if device.type == "cuda":  # not available on a CPU
            peaks[name] = peak_bytes(runs[f"{case.name} {name} eager"], device)
    times = interleave(runs, options.repeats, warm_up=2)
    per_image = {
        what: [seconds / options.batch for seconds in values] for what, values in times.items()
    }
    bases = ("bf16", "fp32") if device.type == "cpu" else ("bf16",)
    return [
        _ratio(case, per_image, name, base, mode, memory, peaks, options.batch)
        for mode in modes
        for base in bases
        for name in names
        if name != base
    ]


def _ratio(
    case: Case,
    times: dict[str, list[float]],
    name: str,
    base: str,
    mode: str,
    memory: dict[str, int],
    peaks: dict[str, int],
    batch: int,
) -> Ratio:
    ratio = Ratio.of(times, f"{case.name} {name} {mode}", f"{case.name} {base} {mode}")
    note = (
        f"per image and step, batch {batch}, weights {memory[name] / 2**20:.1f} /"
        f" {memory[base] / 2**20:.1f} MiB"
    )
    if peaks:
        working, base_working = peaks[name] / 2**20, peaks[base] / 2**20
        note += f", beside them {working:.1f} / {base_working:.1f} MiB at the peak of an eager step"
    backend = BACKENDS[name]
    if backend.quantizes and base == "bf16":
        share = quantizable_share(case, backend)
        limit = bound(share, backend.wire_format)
        note += f", {share:.1%} of the work quantizable: at most {limit:.2f}x on a GPU"
        note += (
            f", {1 / ratio.value / limit:.0%} of it reached" if torch.cuda.is_available() else ""
        )
    return Ratio(**{**vars(ratio), "note": note})


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the peak number of bytes that ``run`` allocates on a GPU, beyond the previous ones."""
    run()  # warm-up: libraries allocate once
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def one_step(
    case: Case, denoiser: nn.Module, batch: int, device: torch.device
) -> Callable[[], object]:
    """Return a function that runs one transformer call for a batch and waits for its end."""
    x, sigma, cond = case.inputs(batch, device)

    @torch.no_grad()
    def run() -> None:
        case.family.velocity(denoiser, x, sigma, cond)
        synchronize(device)

    return run


def bounds(sizes: tuple[tuple[str, int], ...]) -> list[str]:
    """Return quantizable share and speedup bounds of (architecture, pixels) as Markdown rows."""
    rows = []
    for name, pixels in sizes:
        with case_of(name, pixels, False) as case:
            share = quantizable_share(case, BACKENDS["torch_nvfp4"])
        rows.append(
            f"| {name} | {pixels} x {pixels} | {share:.2f} | {bound(share, 'fp8'):.2f}x |"
            f" {bound(share, 'nvfp4'):.2f}x |"
        )
    return rows


if __name__ == "__main__":
    print("\n".join(bounds((("flux.1-dev", 512), *((name, 1024) for name in published_names())))))
