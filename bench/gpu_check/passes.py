"""Time of decoding, and of a learner's passes relative to those of the bare denoiser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from bench.architectures import Case
from bench.gpu_check.findings import Finding, Item
from bench.gpu_check.setting import FAMILIES, Setting, autoencoder, measure_each
from bench.timing import Ratio, interleave
from configs.training import Lora
from policy.attention import without_cudnn_attention
from policy.decoders import compiled_decoder
from policy.device import synchronize
from policy.families.architectures import build
from policy.families.base import Diffusers
from policy.lora import add_adapters, use_adapter
from policy.merging import merged
from policy.types import Conditioning

DECODED, BATCH = 2, 4
"""Numbers of decoded images and of images per pass.

The presets have 24 per pass, so merging has a smaller share there.
"""
DECODE_REPEATS, REPEATS, CPU_REPEATS = 5, 2, 1
STEPS = 10
"""Sampling steps of a call that regenerates, as in the presets."""
COMPILING_S = 30.0
"""Minimum remaining seconds to start compiling a decoder."""
MOST = {"regenerating": 1.10, "training": 1.25}
"""Maximum time of these passes relative to those of the bare denoiser."""
TINY_CHANNELS = 16
"""Latent channels of the published tiny decoders, taesd3 and taef1."""
Inputs = tuple[Tensor, Tensor, Conditioning]
Run = Callable[[], object]


def decode(setting: Setting) -> Iterator[Item]:
    """Measure seconds per image in FP32, BF16, compiled, and by a tiny decoder, alternately."""
    # the autoencoder of Large is that of Medium
    names = (name for name in setting.architectures if name != "sd3.5-large")
    return measure_each(setting, names, 5.0, partial(_decoding, setting))


def _decoding(setting: Setting, case: Case, name: str) -> Iterator[Finding]:
    latents = torch.randn(DECODED, *case.family.latent_shape)
    decoders: dict[str, Diffusers] = {
        form: autoencoder(name, setting.device, dtype, not setting.gpu)
        for form, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    }
    if setting.gpu and setting.left > COMPILING_S:
        decoders["bf16 compiled"] = compiled_decoder(decoders["bf16"])
    if tiny := _tiny(case, setting):
        decoders["tiny"] = tiny
    runs: dict[str, Run] = {
        form: lambda vae=vae: case.family.decode(vae, latents, batch_size=1)
        for form, vae in decoders.items()
    }
    repeats = DECODE_REPEATS if setting.gpu else CPU_REPEATS
    times = interleave(runs, repeats, warm_up=setting.warm_up)
    for form in list(runs)[1:]:
        ratio = Ratio.of(times, "fp32", form)
        yield Finding(
            f"{case.name}, decoding in {form.upper()} against FP32",
            ratio.value,
            "x FP32",
            {"architecture": case.name, "form": form},
            {
                "fp32 seconds": ratio.seconds / DECODED,
                "seconds": ratio.base_seconds / DECODED,
                "low": ratio.low,
                "high": ratio.high,
            },
            "per image, copied to the host",
        )


def _tiny(case: Case, setting: Setting) -> Diffusers | None:
    """Build a tiny decoder of the published size with random weights, in BF16 on a GPU.

    Some CPUs convolve in BF16 dozens of times slower than in FP32. Returns None for latents with
    another number of channels than the published ones take.
    """
    if case.family.part_config("vae").get("latent_channels") != TINY_CHANNELS:
        return None
    part = {"class": "diffusers.AutoencoderTiny", "config": {"latent_channels": TINY_CHANNELS}}
    return build(part, setting.device, setting.dtype)


# ---- LoRA


def lora(setting: Setting) -> Iterator[Item]:
    """Measure a learner's passes relative to the same passes of the bare denoiser."""
    return measure_each(setting, FAMILIES, 10.0, partial(_passes, setting))


def _passes(setting: Setting, case: Case, _: str) -> Iterator[Finding]:
    device = setting.device
    with torch.random.fork_rng(devices=[device] if setting.gpu else []):
        torch.manual_seed(0)
        bare: Diffusers = case.build(device, setting.dtype)
        adapted: Diffusers = case.build(device, setting.dtype)
    add_adapters(adapted, Lora(), case.family)
    for model in (bare, adapted):
        model.enable_gradient_checkpointing()
    inputs = case.inputs(BATCH, device)
    runs: dict[str, Run] = {
        "bare, to sample": _sampling(case, bare, inputs),
        # merged once per call
        "regenerating": within(partial(merged, adapted, "old"), _sampling(case, adapted, inputs)),
        "bare, to train": training(case, bare, inputs),
        "training": within(
            partial(use_adapter, adapted, "current"), training(case, adapted, inputs)
        ),
    }
    times = interleave(runs, REPEATS if setting.gpu else CPU_REPEATS, warm_up=setting.warm_up)
    for form in MOST:
        base = "bare, to train" if form == "training" else "bare, to sample"
        ratio = Ratio.of(times, form, base)
        yield Finding(
            f"{case.name}, {form} / {base}",
            ratio.value,
            "x",
            {"architecture": case.name, "form": form},
            {"low": ratio.low, "high": ratio.high, "bare seconds": ratio.base_seconds / BATCH},
            "forward and backward, blocks computed again"
            if form == "training"
            else f"{STEPS} steps",
        )


def _sampling(case: Case, transformer: nn.Module, inputs: Inputs) -> Run:
    """Return a function that makes all steps of one sampling call."""

    @torch.no_grad()
    def run() -> None:
        for _ in range(STEPS):
            case.family.velocity(transformer, *inputs)
        synchronize(inputs[0].device)

    return run


def training(case: Case, transformer: nn.Module, inputs: Inputs) -> Run:
    """Return a function that makes a forward and a backward pass.

    The input requires a gradient, so that the bare denoiser, which is frozen, has a backward pass.
    """
    x, sigma, cond = inputs
    sigmas = sigma.to(x.device).expand(len(x))

    def run() -> None:
        transformer.zero_grad(set_to_none=True)
        start = x.clone().requires_grad_()
        with without_cudnn_attention(x.device):
            case.family.velocity(transformer, start, sigmas, cond).square().mean().backward()
        synchronize(x.device)

    return run


def within(weights: Callable[[], AbstractContextManager[object]], passes: Run) -> Run:
    """Return a function that runs ``passes`` within the context ``weights``."""

    def run() -> None:
        with weights():
            passes()

    return run
