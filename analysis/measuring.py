"""What ``sol-rl fidelity``, ``signal`` and ``tune`` share: models, scorers and their errors, in one
process without Ray.
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
"""Images of a prompt's seeds."""


@contextlib.contextmanager
def measuring(config: RunConfig, asked: int | None, out: Path, unscored: str) -> Iterator[None]:
    """Make the directory ``out``, and use as many CPU threads as ``asked``, else as configured.

    Errors within the block become RunFailed or ConfigError; ``unscored`` says why an image that
    cannot be scored ends the measurement.
    """
    make_output(out)
    hide_loading_bars()
    with threads(asked or config.services.rollout.threads):
        try:
            yield
        except ScorerError as error:
            raise RunFailed(f"{error}; {unscored}") from None
        except (FileNotFoundError, ScorerSetupError) as error:
            raise ConfigError(str(error)) from None
        except (CheckpointError, CompileFailed, NonFiniteTraining, OSError) as error:
            raise RunFailed(str(error)) from None


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


def choose_prompts(config: RunConfig, count: int, iteration: int = 0) -> list[Prompt]:
    """``count`` distinct training prompts: those of a run's ``iteration`` with so many prompts.

    Raises ConfigError where there are fewer.
    """
    everything = read_prompts(config.prompts.train)
    if count > len(everything):
        raise ConfigError(
            f"--prompts {count}: {config.prompts.train} holds {len(everything)}; ask for fewer"
        )
    rows = prompts_of_iteration(len(everything), count, iteration, config.seed)
    return [everything[row] for row in rows]


def seeds_of(config: RunConfig, prompts: int, count: int) -> list[list[int]]:
    """``count`` seeds for each prompt, of a stream that no run draws from."""
    return [
        [stream_seed(config.seed, "fidelity", p, n) for n in range(count)] for p in range(prompts)
    ]


@contextlib.contextmanager
def setup() -> Iterator[None]:
    """A ValueError of a model or a backend within the block, or function, becomes a ConfigError."""
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
    """Proxy images, in the same chunks as in a run; ``upto`` as in ``sample``.

    With ``explore.paths`` the paths are those of the first iteration. Raises ConfigError where
    these need more ``steps``.
    """
    size, guided = config.explore.chunk_size, Guided.of(config.guidance, "explore")
    solver = proxy_solver(config)
    path, start = explored_paths(config, solver, 0), shared_start(config, seeds)
    parts = [seeds[first : first + size] for first in range(0, len(seeds), size)]
    if path is not None:
        with setup():
            fewer_steps(path.steps, steps, path.window)
    return np.concatenate(
        [
            explorer.explore(cond, part, steps, solver, guided, upto, path, start)[0]
            for part in parts
        ]
    )


def regenerated(trainer: Trainer, cond: Conditioning, seeds: list[int]) -> np.ndarray:
    """Images of seeds of one prompt by the sampling policy, as a run regenerates them."""
    start = shared_start(trainer.config, seeds)
    return trainer.generator.generate(cond, seeds, start=start)[1]


def rewards_of(
    scorer: WeightedScorer, config: RunConfig, images: np.ndarray, prompt: Prompt
) -> np.ndarray:
    """Rewards float32 [B] of images of one prompt. Raises ScorerError."""
    count = len(images)
    return scorer(
        images, [prompt.text] * count, [prompt.scorer_metadata(config.model)] * count
    ).total


class ScoredSeeds:
    """P prompts with N seeds each, and the scorers of their images."""

    def __init__(self, config: RunConfig, prompts: Sequence[Prompt], seeds: int) -> None:
        self.config, self.prompts = config, prompts
        self.scorer = WeightedScorer.from_config(config.rewards)
        self.conditioning = encoded(config, list(prompts))
        self.seeds = seeds_of(config, len(prompts), seeds)

    def rewards(self, generate: Generate) -> tuple[np.ndarray, float]:
        """(rewards float32 [P, N] of the images that ``generate`` makes of each prompt's seeds,
        seconds per image with its scoring). Raises ScorerError.
        """
        start, rows = time.perf_counter(), []
        for prompt, cond, seeds in zip(self.prompts, self.conditioning, self.seeds, strict=True):
            rows.append(rewards_of(self.scorer, self.config, generate(cond, seeds), prompt))
        rewards = np.stack(rows)
        return rewards, (time.perf_counter() - start) / rewards.size


def encoded(config: RunConfig, prompts: list[Prompt]) -> list[Conditioning]:
    """Conditioning of one row for each prompt, on the CPU.

    Raises ConfigError for images to edit that are missing, or that the model does not take.
    """
    check_prompts(config, prompts)
    negative = config.guidance.negative_prompt if config.guidance.stages else None
    family, dtype = family_for(config.model), DTYPES[config.regenerate.precision]
    text = family.load_text(device(), dtype, negative)
    return [
        text.encode([prompt.text], [prompt.source(config.model)]).to(device="cpu")
        for prompt in prompts
    ]


@setup()
def trainer_of(config: RunConfig, checkpoint: Path | None = None) -> Trainer:
    """A learner of the base model, or of a checkpoint."""
    trainer = Trainer(config, device=device())
    if checkpoint is not None:
        trainer.load(checkpoint)
    return trainer


@setup()
def explorer_of(config: RunConfig, trainer: Trainer, backend: Backend) -> Explorer:
    """An explorer that has loaded the learner's sampling policy in the backend's format."""
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
    """The device of all measurements."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
