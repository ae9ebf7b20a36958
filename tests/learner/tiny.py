"""A trainer of the tiny random SD3 with non-trivial adapters, and groups to train it on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.schema import RunConfig
from learner.objectives.base import Points
from learner.trainer import Group, Trainer
from policy.lora import adapter_state, load_adapter_state
from policy.types import Conditioning
from tests.tiny_sd3 import TINY_HEIGHT, TINY_LATENT, TINY_WIDTH


def tiny_config(model: Path, **more: Any) -> RunConfig:
    """Return a configuration with the defaults of the paper, except what a tiny model needs.
    ``more`` replaces whole sections.
    """
    sections: dict[str, Any] = {
        "name": "tiny",
        "seed": 11,
        "model": {
            "family": "sd3",
            "path": str(model),
            "height": TINY_HEIGHT,
            "width": TINY_WIDTH,
            "max_sequence_length": 12,
        },
        "prompts": {"train": "train.txt", "test": "test.txt", "per_iteration": 2},
        "rewards": {"scorers": [{"name": "jpeg_compressibility"}]},
        "explore": {"pool_size": 8, "backend": "fp32"},
        "selection": {"keep": 4},
        "regenerate": {"steps": 4, "precision": "fp32", "batch_size": 8},
        "objective": {"times_per_sample": 3},
        "lora": {"rank": 4, "alpha": 8},
        "optimizer": {"lr": 1e-2},
    }
    return RunConfig.model_validate(sections | more)


def tiny_trainer(
    model: Path,
    failure_dir: Path | None = None,
    perturb: bool = True,
    shard: bool = False,
    **more: Any,
) -> Trainer:
    """Return a tiny trainer. ``perturb`` gives each adapter different weights, so that old,
    current, EMA and reference all differ.
    """
    trainer = Trainer(tiny_config(model, **more), failure_dir=failure_dir, shard=shard)
    if perturb:
        for number, name in enumerate(trainer.adapters):
            rng = np.random.default_rng(100 + number)
            state = {
                key: value + _normal(rng, value.shape, 0.1)
                for key, value in adapter_state(trainer.transformer, name).items()
            }
            load_adapter_state(trainer.transformer, name, state)
    return trainer


def tiny_groups(count: int = 2, samples: int = 3, seed: int = 0) -> list[Group]:
    """Return ``count`` prompts with random conditioning, latents and rewards."""
    rng = np.random.default_rng(seed)
    return [
        Group(
            prompt_index=index,
            cond=Conditioning(
                {
                    "prompt_embeds": _normal(rng, (1, 7, 32)),
                    "pooled_prompt_embeds": _normal(rng, (1, 32)),
                }
            ),
            samples={"latents": rng.standard_normal((samples, *TINY_LATENT), np.float32)},
            rewards=rng.standard_normal(samples).astype(np.float32),
        )
        for index in range(count)
    ]


def in_float64(points: Points) -> Points:
    """Return the same points in float64, for finite differences."""
    return points._each(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def training_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return every tensor that training may change."""
    states = {
        f"{name}/{key}": t
        for name in trainer.adapters
        for key, t in adapter_state(trainer.transformer, name).items()
    }
    return states | trainer.updater.trained.state()


def identical(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Return whether names and bits are equal."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _normal(rng: np.random.Generator, shape: Any, scale: float = 1.0) -> torch.Tensor:
    return torch.from_numpy(scale * rng.standard_normal(tuple(shape), np.float32))
