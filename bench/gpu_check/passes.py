"""Decoding, and the passes of a learner beside the bare denoiser's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from bench.explorer import Case
from bench.gpu_check.findings import Finding, Item, LeftOut
from bench.gpu_check.setting import Setting, autoencoder, finish, free
from bench.timing import Ratio, interleave
from configs.sections import Lora
from policy.families.architectures import build
from policy.families.base import Diffusers
from policy.lora import add_adapters, use
from policy.types import Conditioning

BATCH, REPEATS, CPU_REPEATS = 2, 5, 1
Inputs = tuple[Tensor, Tensor, Conditioning]


def decode(setting: Setting) -> Iterator[Item]:
    """Seconds per image in FP32 and BF16, in turns."""
    for name in setting.architectures:
        if name == "sd3.5-large":  # its autoencoder is Medium's
            continue
        if setting.gpu and setting.left < 5.0:
            yield LeftOut(name, "no time was left")
            continue
        with setting.case(name) as case:
            yield _decoding(case, name, setting)
        free()


def _decoding(case: Case, name: str, setting: Setting) -> Finding:
    device = setting.device
    latents = torch.randn(BATCH, *case.family.latent_shape)
    runs: dict[str, Callable[[], object]] = {}
    for form, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        vae = autoencoder(name, device, dtype, not setting.gpu)
        runs[form] = lambda vae=vae: case.family.decode(vae, latents, batch_size=1)
    times = interleave(runs, REPEATS if setting.gpu else CPU_REPEATS, warm_up=1)
    ratio = Ratio.of(times, "fp32", "bf16")
    return Finding(
        f"{case.name}, decoding in BF16 against FP32",
        ratio.value,
        "x FP32",
        {"architecture": case.name, "form": "bf16"},
        {
            "fp32 seconds": ratio.seconds / BATCH,
            "bf16 seconds": ratio.base_seconds / BATCH,
            "low": ratio.low,
            "high": ratio.high,
        },
        "per image, copied to the host",
    )


# ---- LoRA


def lora(setting: Setting) -> Iterator[Item]:
    """Forward passes with an adapter, and training passes, over the bare forward pass."""
    for name in ("sana-1.6b", "sd3.5-medium", "flux.1-dev"):
        if setting.gpu and setting.left < 10.0:
            yield LeftOut(name, "no time was left")
            continue
        with setting.case(name) as case:
            yield from _passes(case, setting)
        free()


def _passes(case: Case, setting: Setting) -> Iterator[Finding]:
    device = setting.device
    with torch.random.fork_rng(devices=[device] if setting.gpu else []):
        torch.manual_seed(0)
        bare = build(case.part, device, setting.dtype)
        adapted: Diffusers = build(case.part, device, setting.dtype)
    add_adapters(adapted, Lora(), case.family)
    inputs = case.inputs(BATCH, device)
    runs = {
        "bare": _forward(case, bare, inputs, None),
        "adapter": _forward(case, adapted, inputs, "old"),
        "training": _training(case, adapted, inputs),
    }
    if setting.gpu:
        adapted.enable_gradient_checkpointing()
    times = interleave(runs, REPEATS if setting.gpu else CPU_REPEATS, warm_up=1)
    for form in ("adapter", "training"):
        ratio = Ratio.of(times, form, "bare")
        yield Finding(
            f"{case.name}, {form} / bare forward",
            ratio.value,
            "x",
            {"architecture": case.name, "form": form},
            {"low": ratio.low, "high": ratio.high, "bare seconds": ratio.base_seconds / BATCH},
            "forward and backward, blocks computed again" if form == "training" else "forward",
        )


def _forward(
    case: Case, transformer: nn.Module, inputs: Inputs, name: str | None
) -> Callable[[], None]:
    @torch.no_grad()
    def run() -> None:
        with use(transformer, name):
            case.family.velocity(transformer, *inputs)
        finish(inputs[0].device)

    return run


def _training(case: Case, transformer: nn.Module, inputs: Inputs) -> Callable[[], None]:
    x, sigma, cond = inputs
    sigmas = sigma.to(x.device).expand(len(x))

    def run() -> None:
        transformer.zero_grad(set_to_none=True)
        with use(transformer, "current"):
            velocity = case.family.velocity(transformer, x, sigmas, cond)
            (velocity - x).square().mean().backward()
        finish(x.device)

    return run
