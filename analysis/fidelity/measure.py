"""``sol-rl fidelity``: how well do cheap proxies rank seeds, by backend and explore steps?

One process, no Ray. The prompts are training prompts (nothing is tuned on held-out ones), the
seeds a stream of their own. The truth is the reward of the same seeds at ``regenerate.steps`` in
``regenerate.precision``.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from analysis.fidelity.results import Measurement, Rewards, Weights, summarise, tables, write
from configs.load import ConfigError
from configs.prompts import Prompt, prompts_of_iteration, read_prompts
from configs.schema import RunConfig
from learner.checkpoint import CheckpointError
from learner.fidelity import HALVES
from learner.publish import export_policy
from learner.trainer import Trainer
from planning.preflight import check_model, check_prompts
from policy.decoders import load_decoder
from policy.device import threads
from policy.explorer import Explorer
from policy.families import family_for
from policy.lora import adapted_modules
from policy.precision.backends import Backend, resolve_backend
from policy.precision.compiling import CompileFailed, compiler_missing
from policy.sampling.guidance import Guided
from policy.sampling.noise import stream_seed
from policy.types import DTYPES, Conditioning
from records.errors import RunFailed
from records.rundir import make_output, versions
from rewards.base import ScorerError, ScorerSetupError
from rewards.combine import WeightedScorer

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

Say = Callable[[str], None]
SAID = {"beside": "adapter beside", "base": "base weights"}


def run(config: RunConfig, wanted: Measurement, out: Path, say: Say) -> list[str]:
    """Measure, write fidelity.json, rewards.json and density.svg to ``out``; returns the tables.

    Raises ConfigError for what cannot be measured, RunFailed when an image cannot be scored or a
    file not written.
    """
    if 2 * max(HALVES) > wanted.seeds:
        raise ConfigError(
            f"--seeds {wanted.seeds}: best {max(HALVES)} and worst {max(HALVES)} need at least"
            f" {2 * max(HALVES)}"
        )
    backends(wanted.backends)
    check_model(config)
    missing = (
        compiler_missing(device()) if config.explore.compile or config.regenerate.compile else None
    )
    if missing is not None:
        raise ConfigError(f"compile: {missing}: install it or set compile = false")
    prompts = choose_prompts(config, wanted.prompts)
    make_output(out)
    hide_loading_bars()
    with threads(wanted.threads or config.services.rollout.threads):
        try:
            rewards = measure(config, wanted, prompts, say)
            summary = summarise(config, wanted, rewards) | {
                "threads": torch.get_num_threads(),
                "versions": versions(),
            }
        except ScorerError as error:
            raise RunFailed(f"{error}; a noise without a reward has no rank") from None
        except (CheckpointError, CompileFailed) as error:
            raise RunFailed(str(error)) from None
        except (FileNotFoundError, ScorerSetupError) as error:
            raise ConfigError(str(error)) from None
    try:
        write(out, summary, prompts, rewards)
    except OSError as error:
        raise RunFailed(
            f"{out}: {error.strerror or error}: give another directory with --out"
        ) from None
    return [*tables(summary), f"written: {out / 'fidelity.json'}, rewards.json, density.svg"]


def hide_loading_bars() -> None:
    """Keep loading bars, and warnings of truncated empty prompts, out of what is printed."""
    import diffusers.utils.logging
    import transformers.utils.logging

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    for handler in logging.getLogger("diffusers").handlers:
        handler.addFilter(_cuts_something)


def _cuts_something(record: logging.LogRecord) -> bool:
    """False for diffusers' warning that an empty part of a prompt was truncated."""
    text = record.getMessage()
    return "was truncated" not in text or not text.rstrip().endswith("['']")


def backends(names: Sequence[str], say: Say = lambda line: None) -> dict[str, Backend]:
    """Backends by name, each once; says what "auto" took. Raises ConfigError: not available."""
    try:
        found = {name: resolve_backend(name, device(), "--backends") for name in names}
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for name, (backend, why) in found.items():
        if backend.name != name:
            say(f"{backend.name} ({why})")
    return {backend.name: backend for backend, _ in found.values()}


def choose_prompts(config: RunConfig, count: int) -> list[Prompt]:
    """``count`` distinct training prompts, drawn by the run seed."""
    everything = read_prompts(config.prompts.train)
    if count > len(everything):
        raise ConfigError(
            f"--prompts {count}: {config.prompts.train} holds {len(everything)}; ask for fewer"
        )
    return [everything[row] for row in prompts_of_iteration(len(everything), count, 0, config.seed)]


def measure(config: RunConfig, wanted: Measurement, prompts: list[Prompt], say: Say) -> Rewards:
    """Every image made and scored, by the sampling policy of the objective."""
    scorer = WeightedScorer.from_config(config.rewards)
    conditioning = encoded(config, prompts)
    seeds = [
        [stream_seed(config.seed, "fidelity", p, n) for n in range(wanted.seeds)]
        for p in range(len(prompts))
    ]
    result = Rewards(np.empty((len(prompts), wanted.seeds), np.float32))

    def fill(
        name: str, rewards: np.ndarray, make: Callable[[Conditioning, list[int]], np.ndarray]
    ) -> None:
        start = time.perf_counter()
        for p, prompt in enumerate(prompts):
            images = make(conditioning[p], seeds[p])
            rewards[p] = rewards_of(scorer, config, images, prompt)
        result.seconds[name] = (time.perf_counter() - start) / rewards.size
        say(
            f"{name}: {rewards.size} images, {result.seconds[name] * 1e3:.1f} ms each, mean"
            f" reward {rewards.mean():.4f}"
        )

    with setup():
        trainer = trainer_of(config, wanted.checkpoint)
    fill("truth", result.truth, lambda cond, part: trainer.regenerate(cond, part)[1])
    found = backends(wanted.backends, say)
    for (name, backend), weights in itertools.product(found.items(), wanted.weights):
        with setup():
            explorer = published(config, trainer, backend, weights)
        label = name if weights == "merged" else f"{name}, {SAID[weights]}"
        for steps in dict.fromkeys(wanted.steps):
            rewards = result.proxies[label, steps] = np.empty_like(result.truth)
            fill(
                f"{label}, {steps} steps",
                rewards,
                lambda cond, part, explorer=explorer, steps=steps: explored(
                    explorer, config, cond, part, steps
                ),
            )
    return result


@contextlib.contextmanager
def setup() -> Iterator[None]:
    """What a model or a backend refuses is the configuration's fault."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from None


def explored(
    explorer: Explorer,
    config: RunConfig,
    cond: Conditioning,
    seeds: list[int],
    steps: int,
    upto: int | None = None,
) -> np.ndarray:
    """Proxy images in the very chunks that a run would make them in; ``upto`` as in ``sample``."""
    size, guided = config.explore.chunk_size, Guided.of(config.guidance, "explore")
    parts = [seeds[first : first + size] for first in range(0, len(seeds), size)]
    return np.concatenate(
        [
            explorer.explore(cond, part, steps, config.explore.solver, guided, upto)[0]
            for part in parts
        ]
    )


def rewards_of(
    scorer: WeightedScorer, config: RunConfig, images: np.ndarray, prompt: Prompt
) -> np.ndarray:
    """Rewards float32 [B] of images of one prompt. Raises ScorerError."""
    count = len(images)
    return scorer(images, [prompt.text] * count, [prompt.told(config.model)] * count).total


def encoded(config: RunConfig, prompts: list[Prompt]) -> list[Conditioning]:
    """Conditioning of one row for each prompt, on the CPU.

    Raises ConfigError for images to edit that the model does not take, or that are not there.
    """
    check_prompts(config, prompts)
    negative = config.guidance.negative_prompt if config.guidance.stages else None
    family, dtype = family_for(config.model), DTYPES[config.regenerate.precision]
    text = family.load_text(device(), dtype, negative)
    return [
        text.encode([prompt.text], [prompt.source(config.model)]).to(device="cpu")
        for prompt in prompts
    ]


def trainer_of(config: RunConfig, checkpoint: Path | None = None) -> Trainer:
    """A learner of the base model, or of a checkpoint."""
    trainer = Trainer(config, device=device())
    if checkpoint is not None:
        trainer.load(checkpoint)
    return trainer


def published(config: RunConfig, trainer: Trainer, backend: Backend, weights: Weights) -> Explorer:
    """An explorer that was given the learner's policy in one of the ways that could be published.

    ``merged``: as a run does it. ``base``: the base model alone, as if nothing were published.
    ``beside``: that, with the adapter in full precision beside its packed layers, as if the adapter
    alone were published.
    """
    if weights == "merged":
        return explorer_of(config, trainer, backend)
    explorer = explorer_of(config, trainer_of(config), backend)
    if weights == "beside":
        adapter = trainer.objective.sampling_adapter
        for name, layer in adapted_modules(trainer.transformer):
            module = explorer.transformer.get_submodule(name)
            module.register_forward_hook(partial(_add_adapter, layer, adapter))
    return explorer


def _add_adapter(
    layer: LoraLayer, adapter: str, _: nn.Module, given: tuple[Tensor, ...], answer: Tensor
) -> Tensor:
    """A packed layer's answer plus (alpha / rank) B A x."""
    down, up = layer.lora_A[adapter], layer.lora_B[adapter]
    return answer + layer.scaling[adapter] * up(down(given[0].float())).to(answer.dtype)


def explorer_of(config: RunConfig, trainer: Trainer, backend: Backend) -> Explorer:
    """An explorer that was given the learner's sampling policy in the backend's format."""
    settings, dtype = config.explore, DTYPES[config.regenerate.precision]
    smaller = config.explored_model != config.model
    explorer = Explorer(
        family_for(config.explored_model),
        backend,
        settings.modules_to_not_convert,
        device(),
        dtype,
        activation_amax=settings.activation_amax,
        compile=settings.compile,
        full=trainer.family if smaller else None,
        vae=load_decoder(config, trainer.family, device()),
    )
    adapter, size = trainer.objective.sampling_adapter, config.publish.shard_mb * 2**20
    manifest, chunks = export_policy(
        trainer.transformer,
        adapter,
        explorer.plan,
        backend,
        0,
        size,
        settings.scale_search,
        settings.frozen_amax,
    )
    explorer.load(manifest, chunks)
    return explorer


def device() -> torch.device:
    """Where everything is measured."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
