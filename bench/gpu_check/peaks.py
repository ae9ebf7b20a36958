"""Peak memory of passes, compared with what ``sol-rl plan`` counts on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch

from bench.architectures import Case
from bench.explorer import peak_bytes
from bench.gpu_check.findings import Finding, Item, LeftOut
from bench.gpu_check.setting import ARCHITECTURES, NEWER, Setting, autoencoder, free, measure_each
from configs.training import Lora
from planning import passes, sizes
from policy import meta, pass_cost
from policy.attention import without_cudnn_attention
from policy.device import out_of_memory
from policy.families.base import Diffusers
from policy.lora import add_adapters, use_adapter
from policy.merging import merged

BATCH = 4


def measure(setting: Setting) -> Iterator[Item]:
    """Measure bytes of weights, and on a GPU the peaks of sampling, training and decoding."""
    if not setting.gpu:
        yield LeftOut("peaks", "only a GPU's allocator keeps its peak")
    names = (*ARCHITECTURES, *NEWER) if setting.gpu else ("sd3.5-medium", *NEWER)
    yield from measure_each(setting, names, 15.0, partial(_against_plan, setting))


def _against_plan(setting: Setting, case: Case, name: str) -> Iterator[Item]:
    try:
        yield from _weights(case, setting)
        if setting.gpu:
            yield from _peaks(case, name, setting)
    except torch.OutOfMemoryError as error:
        yield LeftOut(name, f"it does not fit on one GPU: {out_of_memory(error)}")


def _weights(case: Case, setting: Setting) -> Iterator[Finding]:
    built = case.build(setting.device, setting.dtype)
    held = pass_cost.held_bytes(meta.as_loaded(built, setting.dtype))
    planned = pass_cost.held_bytes(meta.meta_denoiser(case.family, setting.dtype))
    yield _against(case, "weights", held, planned)


def _peaks(case: Case, name: str, setting: Setting) -> Iterator[Finding]:
    family, device, dtype = case.family, setting.device, setting.dtype
    blank = meta.meta_denoiser(family, dtype)
    work = pass_cost.denoiser_cost(family, blank, BATCH, dtype)
    yield _against(case, "step", peak_bytes(_step(case, setting), device), work.peak)
    free()
    meta.adapt(blank, family, Lora())
    planned = sizes.adapted_bytes(blank) + work.peak
    yield _against(
        case, "regenerating", peak_bytes(_step(case, setting, merges=True), device), planned
    )
    free()
    work = passes.training_work(family, blank, BATCH, dtype, recomputed=1.0)
    yield _against(case, "training pass", peak_bytes(_training(case, setting), device), work.peak)
    free()
    _, work = passes.decoding_work(family, BATCH, gpu=True)
    yield _against(case, "decoding", peak_bytes(_decoding(case, name, setting), device), work.peak)


def _step(case: Case, setting: Setting, merges: bool = False) -> Callable[[], None]:
    transformer = case.build(setting.device, setting.dtype)
    if merges:
        add_adapters(transformer, Lora(), case.family, names=("current",))
    x, sigma, cond = case.inputs(BATCH, setting.device)
    cond = cond.to(dtype=setting.dtype)

    @torch.no_grad()
    def step() -> None:
        with merged(transformer, "current") if merges else nullcontext():
            case.family.velocity(transformer, x, sigma, cond)

    return step


def _training(case: Case, setting: Setting) -> Callable[[], None]:
    transformer: Diffusers = case.build(setting.device, setting.dtype)
    add_adapters(transformer, Lora(), case.family, names=("current",))
    transformer.enable_gradient_checkpointing()
    x, sigma, cond = case.inputs(BATCH, setting.device)
    cond = cond.to(dtype=setting.dtype)
    sigmas = sigma.to(setting.device).expand(BATCH)

    def train() -> None:
        transformer.zero_grad(set_to_none=True)
        with use_adapter(transformer, "current"), without_cudnn_attention(setting.device):
            velocity = case.family.velocity(transformer, x, sigmas, cond)
            loss = (velocity - x).square().mean()
            del velocity
            loss.backward()

    return train


def _decoding(case: Case, name: str, setting: Setting) -> Callable[[], None]:
    vae: Diffusers = autoencoder(name, setting.device, torch.float32, not setting.gpu)
    x, _, _ = case.inputs(BATCH, setting.device)

    @torch.no_grad()
    def decode() -> None:
        case.family.pixels(vae, x).float().clamp(0, 1)

    return decode


def _against(case: Case, what: str, measured: int, planned: int) -> Finding:
    return Finding(
        f"{case.name}, bytes of {what} / those of the plan",
        measured / planned,
        "x",
        {"architecture": case.name, "form": what},
        {"measured GB": measured / 1e9, "planned GB": planned / 1e9},
    )
