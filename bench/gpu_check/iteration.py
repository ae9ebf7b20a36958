"""One complete iteration in one process: explore, select, regenerate, update, pack, load."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import torch

from bench.architectures import Case
from bench.gpu_check.findings import Finding, Item, LeftOut
from bench.gpu_check.setting import FAMILIES, NEWER, Setting, autoencoder, free, loadable
from configs.load import load
from configs.schema import RunConfig
from configs.training import Lora
from learner.batch import Group
from learner.nonfinite import NonFiniteTraining
from learner.selection import select
from learner.trainer import Trainer
from planning import sizes
from policy import meta, pass_cost
from policy.device import out_of_memory, synchronize
from policy.explorer import Explorer
from policy.families import Family
from policy.precision.backends import BACKENDS, Backend
from policy.sampling.guidance import Guided
from policy.sampling.noise import stream_seed
from policy.types import Conditioning

PRESETS = {
    "sana-1.6b": "sana-sol_rl-hpsv2",
    "sd3.5-medium": "sd35_medium-sol_rl-hpsv2",
    "flux.1-dev": "flux1-sol_rl-hpsv2",
    "wan2.1-t2v-1.3b": "wan_1_3b-sol_rl-hpsv2",
    "sana-video-2b-480p": "sana_video-sol_rl-hpsv2",
    "flux.2-klein-4b": "flux2_klein-sol_rl-hpsv2",
    "z-image-turbo": "z_image-sol_rl-hpsv2",
    "qwen-image": "qwen_image-sol_rl-hpsv2",
    "flux.2-dev": "flux2_klein-sol_rl-hpsv2",  # has no preset of its own
}
POOL, KEEP, STEPS, BATCH = 8, 4, 2, 2
LEAST_S = 20.0
"""Minimum remaining seconds to start a family."""
X = TypeVar("X")


def measure(setting: Setting) -> Iterator[Item]:
    """Measure an iteration of each family at its preset's size, with few seeds and steps.

    The reward is computed by a rule.
    """
    for name in (*FAMILIES, *NEWER):
        if setting.gpu and setting.left < LEAST_S:
            yield LeftOut(name, f"{setting.left:.0f} s were left")
            continue
        pixels = load(PRESETS[name]).model.height
        with loadable(setting, name, pixels) as (case, family):
            yield _tried(name, case, family, setting)
        free()


def _tried(name: str, case: Case, family: Family, setting: Setting) -> Item:
    """Run an iteration, or report why it failed, such as too little memory on the GPU."""
    backend = (*setting.quick(), BACKENDS["bf16"])[0]
    if setting.gpu:
        needed = weight_bytes(case, backend, setting.dtype)
        free_bytes, _ = torch.cuda.mem_get_info(setting.device)
        if needed > free_bytes:
            return no_room(case, needed, free_bytes)
    try:
        return _iteration(name, case, family, backend, setting)
    except torch.OutOfMemoryError as error:
        return LeftOut(case.name, f"it does not fit on one GPU: {out_of_memory(error)}")
    except NonFiniteTraining as error:  # continue with the other families
        return LeftOut(case.name, f"failed: {error}")


def no_room(case: Case, needed: int, free_bytes: int) -> LeftOut:
    """Report that a model's weights do not fit, before anything is built."""
    why = f"its weights alone need {needed / 1e9:.0f} GB, {free_bytes / 1e9:.0f} GB are free"
    return LeftOut(case.name, f"it does not fit on one GPU: {why}")


def weight_bytes(case: Case, backend: Backend, dtype: torch.dtype) -> int:
    """Return the bytes of weights that an iteration needs.

    These are the learner's denoiser and its merged weights, the explorer's packed denoiser, and an
    autoencoder in FP32 for each of the two.
    """
    learner = meta.meta_denoiser(case.family, dtype)
    explorer, _, _ = meta.meta_explorer(case.family, backend, (), dtype)
    vae = meta.meta_component(case.family, "vae", torch.float32)
    held = pass_cost.held_bytes(learner, explorer, vae, vae)
    meta.adapt(learner, case.family, Lora())
    return held + sizes.adapted_bytes(learner)


def config_of(name: str, case: Case, family: Family, backend: str, gpu: bool) -> RunConfig:
    """Return the family's preset with few seeds and steps, and the files and size of ``case``."""
    model = case.family.model
    changes = {
        **{"model.family": f"'{model.family}'", "model.path": f"'{family.directory}'"},
        **{"model.height": model.height, "model.width": model.width},
        **{"model.max_sequence_length": model.max_sequence_length},
        **({"model.guidance": model.guidance} if model.guidance is not None else {}),
        **({"model.frames": model.frames} if model.frames is not None else {}),
        **{"explore.pool_size": POOL, "explore.chunk_size": POOL, "explore.steps": STEPS},
        **{"explore.backend": f"'{backend}'", "selection.keep": KEEP},
        **{"regenerate.steps": STEPS, "regenerate.batch_size": BATCH},
        **{"regenerate.precision": "'bf16'" if gpu else "'fp32'"},
        **{"optimizer.batch_size": BATCH, "optimizer.gradient_checkpointing": "true"},
        **{"optimizer.steps_per_iteration": 1, "prompts.per_iteration": 1},
        **{"objective.times_per_sample": STEPS},
    }
    return load(PRESETS[name], [f"{key}={value}" for key, value in changes.items()])


def conditioning(case: Case, config: RunConfig) -> Conditioning:
    """Return one prompt's conditioning on the CPU, with a negative one if guidance is used."""
    _, _, cond = case.inputs(1, "cpu")
    return cond.with_negative(cond) if config.guidance.stages else cond


def _iteration(
    name: str, case: Case, family: Family, backend: Backend, setting: Setting
) -> Finding:
    """Run and time one iteration, stage by stage."""
    config = config_of(name, case, family, backend.name, setting.gpu)
    clip = f", {config.model.frames} frames" if config.model.frames is not None else ""
    device, seconds = setting.device, dict[str, float]()

    def timed(stage: str, do: Callable[[], X]) -> X:
        start = time.perf_counter()
        result = do()
        synchronize(device)
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start
        return result

    # before the trainer: while it packs, the explorer holds the whole unpacked denoiser, and so the
    # learner's denoiser is not in memory at the same time
    explorer = Explorer(family, backend, (), device, setting.dtype)
    free()
    vae = autoencoder(name, device, torch.float32, not setting.gpu)
    trainer = Trainer(config, family, None, vae, device)
    if setting.gpu:
        torch.cuda.reset_peak_memory_stats(device)
    _publish(trainer, explorer, 0)
    cond = conditioning(case, config)
    guided = Guided.of(config.guidance, "explore")
    seeds = [stream_seed(config.seed, "explore", 0, 0, n) for n in range(POOL)]
    solver = config.explore.solver
    proxies, _ = timed("explore", lambda: explorer.explore(cond, seeds, STEPS, solver, guided))
    chosen = timed("select", lambda: select(redness(proxies), KEEP)).indices
    kept = [seeds[index] for index in chosen]
    samples, images = timed("regenerate", lambda: trainer.generator.generate(cond, kept))
    group = Group(0, cond, samples, redness(images))
    metrics = timed("update", lambda: trainer.update(0, [group]))
    timed("pack and load", lambda: _publish(trainer, explorer, 1))
    if explorer.version != 1 or not all(math.isfinite(value) for value in metrics.values()):
        raise RuntimeError(f"version {explorer.version}, metrics {metrics}")
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if setting.gpu else 0.0
    return Finding(
        f"{case.name}, one iteration with {backend.name}",
        sum(seconds.values()),
        "s",
        {"architecture": case.name, "backend": backend.name},
        {**seconds, **({"peak GB": peak} if setting.gpu else {})},
        f"{POOL} seeds, {KEEP} kept, {STEPS} steps,"
        f" {config.model.width} x {config.model.height} pixels{clip}",
    )


def _publish(trainer: Trainer, explorer: Explorer, version: int) -> None:
    """Export a version and load it into the explorer."""
    manifest, shards, _ = trainer.export(version, explorer.backend.name)
    explorer.load(manifest, shards)


def redness(images: np.ndarray) -> np.ndarray:
    """Return a reward by rule, float32 [B], of images uint8 [B, 3, H, W] or clips.

    It differs between any two images. A learned scorer could not tell apart images of random
    weights.
    """
    means = images.astype(np.float64).mean((-2, -1)).reshape(len(images), -1, 3).mean(1)
    order = np.arange(len(images)) * 1e-6  # breaks ties: images of random weights may be equal
    return (means[:, 0] - means[:, 1:].mean(1) + order).astype(np.float32)
