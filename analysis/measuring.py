"""Models, scorers and error handling shared by ``sol-rl fidelity``, ``signal`` and ``tune``.

These commands run in one process without Ray.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from configs.arms import proxy_solver
from configs.load import ConfigError
from configs.prompts import Prompt, prompts_of_iteration, read_prompts
from configs.schema import RunConfig
from learner.checkpoint import CheckpointError
from learner.nonfinite import NonFiniteTraining
from learner.publish import export_policy
from learner.trainer import Trainer
from planning.preflight import check_prompts
from policy.decoders import load_decoder
from policy.device import threads
from policy.explorer import Explorer
from policy.families import family_for
from policy.precision.backends import Backend, resolve_backend
from policy.precision.compiling import CompileFailed
from policy.sampling.guidance import Guided
from policy.sampling.noise import stream_seed
from policy.sampling.paths import explored_paths, fewer_steps, shared_start
from policy.types import DTYPES, Conditioning
from records.errors import RunFailed
from records.rundir import make_output
from rewards.base import ScorerError, ScorerSetupError
from rewards.combine import WeightedScorer

Say = Callable[[str], None]
Generate = Callable[[Conditioning, list[int]], np.ndarray]
"""Function that returns the images of one prompt's seeds."""


@contextlib.contextmanager
def measurement_context(
    config: RunConfig, thread_count: int | None, out: Path, unscored: str
) -> Iterator[None]:
    """Create the directory ``out`` and use ``thread_count`` CPU threads, by default as configured.

    Errors within the block become RunFailed or ConfigError. ``unscored`` is the explanation given
    when an image that cannot be scored ends the measurement.
    """
    make_output(out)
    hide_loading_bars()
    with threads(thread_count or config.services.rollout.threads):
        try:
            yield
        except ScorerError as error:
            raise RunFailed(f"{error}; {unscored}") from None
        except (FileNotFoundError, ScorerSetupError) as error:
            raise ConfigError(str(error)) from None
        except (CheckpointError, CompileFailed, NonFiniteTraining, OSError) as error:
            raise RunFailed(str(error)) from None


def hide_loading_bars() -> None:
    """Suppress loading progress bars and warnings about truncated empty prompts."""
    import diffusers.utils.logging
    import transformers.utils.logging

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    for handler in logging.getLogger("diffusers").handlers:
        handler.addFilter(_is_relevant)


def _is_relevant(record: logging.LogRecord) -> bool:
    """Return False for the warning of diffusers that an empty part of a prompt was truncated."""
    text = record.getMessage()
    return "was truncated" not in text or not text.rstrip().endswith("['']")


def backends(names: Sequence[str], say: Say = lambda line: None) -> dict[str, Backend]:
    """Return name -> backend without duplicates; report through ``say`` what "auto" selected.

    Raises ConfigError if a backend is not available.
    """
    try:
        resolved = {name: resolve_backend(name, device(), "--backends") for name in names}
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for name, (backend, why) in resolved.items():
        if backend.name != name:
            say(f"{backend.name} ({why})")
    return {backend.name: backend for backend, _ in resolved.values()}


def choose_prompts(config: RunConfig, count: int, iteration: int = 0) -> list[Prompt]:
    """Return ``count`` distinct training prompts, those of ``iteration`` in a run with that many.

    Raises ConfigError if there are fewer than ``count`` prompts.
    """
    prompts = read_prompts(config.prompts.train)
    if count > len(prompts):
        raise ConfigError(
            f"--prompts {count}: {config.prompts.train} has only {len(prompts)}: use fewer"
        )
    rows = prompts_of_iteration(len(prompts), count, iteration, config.seed)
    return [prompts[row] for row in rows]


def seeds_of(config: RunConfig, prompts: int, count: int) -> list[list[int]]:
    """Return ``count`` seeds for each prompt, from a stream that no run uses."""
    return [
        [stream_seed(config.seed, "fidelity", p, n) for n in range(count)] for p in range(prompts)
    ]


@contextlib.contextmanager
def config_errors() -> Iterator[None]:
    """Convert a ValueError of a model or backend within the block or function to a ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from None


def explore_images(
    explorer: Explorer,
    config: RunConfig,
    cond: Conditioning,
    seeds: list[int],
    steps: int,
    stop_after: int | None = None,
) -> np.ndarray:
    """Return the proxy images of seeds, computed in the same chunks as in a run.

    ``stop_after`` is passed to ``sample``. With ``explore.paths``, the paths are those of the first
    iteration; raises ConfigError if these cannot be explored in ``steps`` steps.
    """
    size, guided = config.explore.chunk_size, Guided.of(config.guidance, "explore")
    solver = proxy_solver(config)
    path, start = explored_paths(config, solver, 0), shared_start(config, seeds)
    parts = [seeds[first : first + size] for first in range(0, len(seeds), size)]
    if path is not None:
        with config_errors():
            fewer_steps(path.steps, steps, path.window)
    return np.concatenate(
        [
            explorer.explore(cond, part, steps, solver, guided, stop_after, path, start)[0]
            for part in parts
        ]
    )


def regenerate_images(trainer: Trainer, cond: Conditioning, seeds: list[int]) -> np.ndarray:
    """Return images of one prompt's seeds by the sampling policy, as a run regenerates them."""
    start = shared_start(trainer.config, seeds)
    return trainer.generator.generate(cond, seeds, start=start)[1]


def rewards_of(
    scorer: WeightedScorer, config: RunConfig, images: np.ndarray, prompt: Prompt
) -> np.ndarray:
    """Return the rewards, float32 [B], of images of one prompt; raises ScorerError."""
    count = len(images)
    return scorer(
        images, [prompt.text] * count, [prompt.scorer_metadata(config.model)] * count
    ).total


class ScoredSeeds:
    """P prompts with N seeds each, and the scorer of their images."""

    def __init__(self, config: RunConfig, prompts: Sequence[Prompt], seeds: int) -> None:
        self.config, self.prompts = config, prompts
        self.scorer = WeightedScorer.from_config(config.rewards)
        self.conditioning = encode_prompts(config, list(prompts))
        self.seeds = seeds_of(config, len(prompts), seeds)

    def rewards(self, generate: Generate) -> tuple[np.ndarray, float]:
        """Generate and score the images of all seeds.

        Returns the rewards, float32 [P, N], and the seconds per image including its scoring.
        Raises ScorerError.
        """
        start, rows = time.perf_counter(), []
        for prompt, cond, seeds in zip(self.prompts, self.conditioning, self.seeds, strict=True):
            rows.append(rewards_of(self.scorer, self.config, generate(cond, seeds), prompt))
        rewards = np.stack(rows)
        return rewards, (time.perf_counter() - start) / rewards.size


def encode_prompts(config: RunConfig, prompts: list[Prompt]) -> list[Conditioning]:
    """Return a conditioning of one row for each prompt, on the CPU.

    Raises ConfigError if source images are missing, unreadable, or given to a model that does not
    use them.
    """
    check_prompts(config, prompts)
    negative = config.guidance.negative_prompt if config.guidance.stages else None
    family, dtype = family_for(config.model), DTYPES[config.regenerate.precision]
    text = family.load_text(device(), dtype, negative)
    return [
        text.encode([prompt.text], [prompt.source(config.model)]).to(device="cpu")
        for prompt in prompts
    ]


@config_errors()
def load_trainer(config: RunConfig, checkpoint: Path | None = None) -> Trainer:
    """Return a learner with the base model, or with a checkpoint loaded."""
    trainer = Trainer(config, device=device())
    if checkpoint is not None:
        trainer.load(checkpoint)
    return trainer


@config_errors()
def load_explorer(config: RunConfig, trainer: Trainer, backend: Backend) -> Explorer:
    """Return an explorer with the learner's sampling policy loaded in the backend's format."""
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
    manifest, shards = export_policy(
        trainer.transformer,
        adapter,
        explorer.plan,
        backend,
        0,
        size,
        settings.scale_search,
        settings.frozen_amax,
    )
    explorer.load(manifest, shards)
    return explorer


def device() -> torch.device:
    """Return the device of all measurements: CUDA if available, or else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
