"""``sol-rl fidelity``: measure how well proxies rank seeds, by backend and explore steps.

It runs in one process without Ray. It uses training prompts, because nothing may be tuned on
held-out prompts, and seeds that no run uses. The truth is the reward of the same seeds at
``regenerate.steps`` in ``regenerate.precision``.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from analysis.fidelity.results import (
    Measurement,
    Rewards,
    Weights,
    halves_of,
    summarise,
    tables,
    write,
)
from analysis.measuring import (
    Generate,
    Say,
    ScoredSeeds,
    backends,
    choose_prompts,
    device,
    explore_images,
    load_explorer,
    load_trainer,
    measurement_context,
    regenerate_images,
)
from configs.load import ConfigError
from configs.prompts import Prompt
from configs.schema import RunConfig
from learner.trainer import Trainer
from planning.preflight import check_model
from policy.explorer import Explorer
from policy.lora import adapted_modules
from policy.precision.backends import Backend
from policy.precision.compiling import compiler_missing
from records.rundir import output_errors, versions

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

SAID = {"beside": "adapter beside", "base": "base weights"}


def run(config: RunConfig, requested: Measurement, out: Path, say: Say) -> list[str]:
    """Measure, write fidelity.json, rewards.json and density.svg, and return the tables.

    Raises ConfigError if the settings cannot be measured, and RunFailed if an image cannot be
    scored or a file cannot be written.
    """
    halves_of(config, requested.seeds)
    backends(requested.backends)
    check_model(config, requested.steps)
    for key, stage in (("explore", config.explore), ("regenerate", config.regenerate)):
        missing = compiler_missing(device()) if stage.compile else None
        if missing is not None:
            raise ConfigError(f"{key}.compile: {missing}: install it or set {key}.compile = false")
    prompts = choose_prompts(config, requested.prompts)
    with measurement_context(config, requested.threads, out, "a seed without a reward has no rank"):
        rewards = measure(config, requested, prompts, say)
        summary = summarise(config, requested, rewards) | {
            "threads": torch.get_num_threads(),
            "versions": versions(),
        }
    with output_errors(out):
        write(out, summary, prompts, rewards)
    return [*tables(summary), f"written: {out / 'fidelity.json'}, rewards.json, density.svg"]


def measure(config: RunConfig, requested: Measurement, prompts: list[Prompt], say: Say) -> Rewards:
    """Generate and score all images with the sampling policy of the objective."""
    scored = ScoredSeeds(config, prompts, requested.seeds)
    seconds: dict[str, float] = {}

    def rewards(name: str, generate: Generate) -> np.ndarray:
        values, seconds[name] = scored.rewards(generate)
        say(
            f"{name}: {values.size} images, {seconds[name] * 1e3:.1f} ms each, mean reward"
            f" {values.mean():.4f}"
        )
        return values

    trainer = load_trainer(config, requested.checkpoint)
    truth, proxies = rewards("truth", partial(regenerate_images, trainer)), {}
    resolved = backends(requested.backends, say)
    for (name, backend), weights in itertools.product(resolved.items(), requested.weights):
        explorer = published(config, trainer, backend, weights)
        label = name if weights == "merged" else f"{name}, {SAID[weights]}"
        for steps in dict.fromkeys(requested.steps):
            proxies[label, steps] = rewards(
                f"{label}, {steps} steps", partial(explore_images, explorer, config, steps=steps)
            )
    return Rewards(truth, proxies, seconds)


def published(config: RunConfig, trainer: Trainer, backend: Backend, weights: Weights) -> Explorer:
    """Return an explorer with the learner's policy in one of three forms.

    * ``merged``: packed with the adapter merged, as a run publishes it.
    * ``base``: the packed base model without the adapter.
    * ``beside``: the packed base model with the adapter applied in full precision to the output
      of its packed layers.
    """
    if weights == "merged":
        return load_explorer(config, trainer, backend)
    explorer = load_explorer(config, load_trainer(config), backend)
    if weights == "beside":
        adapter = trainer.objective.sampling_adapter
        for name, layer in adapted_modules(trainer.transformer):
            module = explorer.transformer.get_submodule(name)
            module.register_forward_hook(partial(_add_adapter, layer, adapter))
    return explorer


def _add_adapter(
    layer: LoraLayer, adapter: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    """Forward hook that returns the output of a packed layer plus (alpha / rank) B A x."""
    down, up = layer.lora_A[adapter], layer.lora_B[adapter]
    return output + layer.scaling[adapter] * up(down(inputs[0].float())).to(output.dtype)
