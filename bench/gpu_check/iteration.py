"""One whole iteration in one process: explore, select, regenerate, update, pack, load."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import torch

from bench.explorer import Case
from bench.gpu_check.findings import Finding, Item, LeftOut
from bench.gpu_check.setting import FAMILIES, Setting, autoencoder, finish, free, loadable
from configs.load import load
from configs.schema import RunConfig
from learner.batch import Group
from learner.selection import select
from learner.trainer import Trainer
from policy.explorer import Explorer
from policy.families import Family
from policy.precision.backends import BACKENDS
from policy.sampling.noise import stream_seed

PRESETS = {
    "sana-1.6b": "sana-sol_rl-hpsv2",
    "sd3.5-medium": "sd35_medium-sol_rl-hpsv2",
    "flux.1-dev": "flux1-sol_rl-hpsv2",
}
POOL, KEEP, STEPS, BATCH = 8, 4, 2, 2
X = TypeVar("X")


def measure(setting: Setting) -> Iterator[Item]:
    """Of each family at the size of its preset, with few seeds and steps and a reward by rule."""
    for name in FAMILIES:
        if setting.gpu and setting.left < 20.0:
            yield LeftOut(name, f"{setting.left:.0f} s were left")
            continue
        pixels = load(PRESETS[name]).model.height
        with loadable(setting, name, pixels) as (case, family):
            yield from _iteration(name, case, family, setting)
        free()


def config_of(name: str, case: Case, family: Family, backend: str, gpu: bool) -> RunConfig:
    """The preset of this family with few seeds and steps, on the case's files and size."""
    model = case.family.model
    changes = {
        **{"model.path": f"'{family.directory}'", "model.height": model.height},
        **{"model.width": model.width, "model.max_sequence_length": model.max_sequence_length},
        **{"explore.pool_size": POOL, "explore.chunk_size": POOL, "explore.steps": STEPS},
        **{"explore.backend": f"'{backend}'", "selection.keep": KEEP},
        **{"regenerate.steps": STEPS, "regenerate.batch_size": BATCH},
        **{"regenerate.precision": "'bf16'" if gpu else "'fp32'"},
        **{"optimizer.batch_size": BATCH, "optimizer.gradient_checkpointing": "true"},
        **{"optimizer.steps_per_iteration": 1, "prompts.per_iteration": 1},
        **{"objective.times_per_sample": STEPS},
    }
    return load(PRESETS[name], [f"{key}={value}" for key, value in changes.items()])


def _iteration(name: str, case: Case, family: Family, setting: Setting) -> Iterator[Finding]:
    quick = setting.quick()
    backend = quick[0] if quick else BACKENDS["bf16"]
    config = config_of(name, case, family, backend.name, setting.gpu)
    device, seconds = setting.device, dict[str, float]()

    def timed(stage: str, do: Callable[[], X]) -> X:
        start = time.perf_counter()
        found = do()
        finish(device)
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start
        return found

    if setting.gpu:
        torch.cuda.reset_peak_memory_stats(device)
    vae = autoencoder(name, device, torch.float32, not setting.gpu)
    trainer = Trainer(config, family, None, vae, device)
    explorer = Explorer(family, backend, (), device, setting.dtype)
    _publish(trainer, explorer, 0)
    _, _, cond = case.inputs(1, "cpu")  # where the encoder leaves it
    seeds = [stream_seed(config.seed, "explore", 0, 0, n) for n in range(POOL)]
    solver = config.explore.solver
    proxies, _ = timed("explore", lambda: explorer.explore(cond, seeds, STEPS, solver))
    chosen = timed("select", lambda: select(redness(proxies), KEEP)).indices
    kept = [seeds[index] for index in chosen]
    samples, images = timed("regenerate", lambda: trainer.regenerate(cond, kept))
    group = Group(0, cond, samples, redness(images))
    metrics = timed("update", lambda: trainer.update(0, [group]))
    timed("pack and load", lambda: _publish(trainer, explorer, 1))
    if explorer.version != 1 or not all(math.isfinite(value) for value in metrics.values()):
        raise RuntimeError(f"version {explorer.version}, metrics {metrics}")
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if setting.gpu else 0.0
    yield Finding(
        f"{case.name}, one iteration with {backend.name}",
        sum(seconds.values()),
        "s",
        {"architecture": case.name, "backend": backend.name},
        {**seconds, **({"peak GB": peak} if setting.gpu else {})},
        f"{POOL} seeds, {KEEP} kept, {STEPS} steps,"
        f" {config.model.width} x {config.model.height} pixels",
    )


def _publish(trainer: Trainer, explorer: Explorer, version: int) -> None:
    manifest, shards, _ = trainer.export(version, explorer.backend.name)
    explorer.load(manifest, shards)


def redness(images: np.ndarray) -> np.ndarray:
    """A reward by rule, float32 [B] of uint8 [B, 3, H, W], which differs between any two images:
    those of random weights are all alike to a learned scorer.
    """
    means = images.astype(np.float64).mean((2, 3))
    order = np.arange(len(images)) * 1e-6  # images of random weights may be equal
    return (means[:, 0] - means[:, 1:].mean(1) + order).astype(np.float32)
