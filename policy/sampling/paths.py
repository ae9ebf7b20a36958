"""Paths of stochastic solvers: full paths to train on, and cheaper ones with the same noise."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from configs.objective import STOCHASTIC, PathSettings
from configs.schema import RunConfig
from policy.families.base import Family
from policy.sampling.guidance import Guided, velocity
from policy.sampling.noise import noise_for, stream_seed
from policy.sampling.sde import PathSolver, Step
from policy.types import Conditioning


@dataclass(frozen=True)
class PathPlan:
    """Settings of an objective's paths in one iteration; image seeds identify the single paths."""

    solver: PathSolver
    steps: int  # T
    run_seed: int
    window: range | None  # the stochastic steps; None: all

    @classmethod
    def of(cls, settings: PathSettings, steps: int, done: int, run_seed: int) -> PathPlan:
        """Return the plan for paths of ``steps`` steps after ``done`` iterations."""
        solver = PathSolver(settings.solvers[0], settings.eta)
        windowed = settings.window is not None
        return cls(
            solver, steps, run_seed, settings.window_at(steps, done, run_seed) if windowed else None
        )

    def noise_of(self, seeds: Sequence[int], start: int | None) -> tuple[list[int], list[int]]:
        """Return (seeds of the initial noises, seeds of the noise of the steps), one per path.

        ``start`` is the seed of an initial noise that all paths share; if it is None, each image's
        seed is also the seed of its initial noise.
        """
        starts = list(seeds) if start is None else [start] * len(seeds)
        return starts, [stream_seed(self.run_seed, "sde", seed) for seed in seeds]


def explored_paths(config: RunConfig, solver: str, iteration: int) -> PathPlan | None:
    """Return the paths that ``solver`` explores in an iteration; None if it is deterministic."""
    settings = config.objective
    if solver not in STOCHASTIC or not isinstance(settings, PathSettings):
        return None
    return PathPlan.of(settings, config.regenerate.steps, iteration, config.seed)


def shared_start(config: RunConfig, seeds: Sequence[int]) -> int | None:
    """Return the seed of the initial noise that a prompt's paths share, or None if they do not."""
    return seeds[0] if config.objective.one_noise_per_group else None


@dataclass(frozen=True)
class Paths:
    """B sampled paths of T steps, on the CPU."""

    states: Tensor  # float32 [B, T + 1, *latent], from the initial noise to the latents at sigma 0
    log_probs: Tensor  # float32 [B, T], of the step from state j to state j + 1
    latents: Tensor  # float32 [B, *latent] to decode, of ``PathSolver.decoded``
    stochastic: Tensor  # float32 [B, T], 1 for a stochastic step of the solver, 0 for Euler


@torch.no_grad()
def sample_paths(
    family: Family,
    transformer: nn.Module,
    cond: Conditioning,
    noise_seeds: Sequence[int],
    path_seeds: Sequence[int],
    steps: int,
    solver: PathSolver,
    batch_size: int | None = None,
    guided: Guided | None = None,
    window: Container[int] | None = None,
) -> Paths:
    """Sample one path per row of ``cond``, with states and log-probabilities.

    Row i starts from the noise of ``noise_seeds[i]``, and ``path_seeds[i]`` seeds the noise of its
    steps. ``cond`` has B rows; ``batch_size`` paths go through the transformer at a time, None
    means all. Steps outside of ``window`` are Euler steps x + dsigma v with a log-probability of
    0; with None all steps are those of the solver. The noise of a row depends only on its seeds and
    on ``steps``. Raises ValueError if the numbers of rows and seeds differ.
    """
    _check(cond, noise_seeds, path_seeds)
    size = batch_size or max(len(noise_seeds), 1)
    states = torch.empty((len(noise_seeds), steps + 1, *family.latent_shape))
    log_probs = torch.zeros((len(noise_seeds), steps))
    latents = torch.empty((len(noise_seeds), *family.latent_shape))
    sampler = _PathSampler(family, transformer, solver, family.sigmas(steps), window, guided)
    for first in range(0, len(noise_seeds), size):
        rows = slice(first, first + size)
        initial, noise = sampler.noise(noise_seeds[rows], path_seeds[rows], steps)
        states[rows, 0] = initial.cpu()
        for j, x, gaussian, clean in sampler.steps(cond.rows(rows), initial, noise):
            states[rows, j + 1] = x.cpu()
            if gaussian is not None:
                log_probs[rows, j] = gaussian.log_prob(x).cpu()
            if clean is not None:
                latents[rows] = clean.cpu()
    stochastic = torch.tensor([sampler.draws(j) for j in range(steps)], dtype=torch.float32)
    return Paths(states, log_probs, latents, stochastic.expand(len(noise_seeds), steps))


@torch.no_grad()
def sample_ends(
    family: Family,
    transformer: nn.Module,
    cond: Conditioning,
    seeds: Sequence[int],
    plan: PathPlan,
    steps: int,
    start: int | None = None,
    guided: Guided | None = None,
) -> Tensor:
    """Approximate the ends of the paths of ``plan`` in fewer steps.

    Returns latents float32 [B, *latent] on the CPU. Up to the end of the window, steps and noise
    equal those of the full path, so that their effect is visible; the rest is sampled by Euler in
    the remaining ``steps`` (``fewer_steps``). All paths are one batch. Raises ValueError if the
    numbers of rows and seeds differ, or if ``steps`` is too small or exceeds that of the plan.
    """
    starts, streams = plan.noise_of(seeds, start)
    _check(cond, starts, streams)
    positions = fewer_steps(plan.steps, steps, plan.window)
    schedule = family.sigmas(plan.steps)[positions]
    sampler = _PathSampler(family, transformer, plan.solver, schedule, plan.window, guided)
    # noise for all steps of the full path, so that step j gets the same noise as there
    initial, noise = sampler.noise(starts, streams, plan.steps)
    for *_, clean in sampler.steps(cond, initial, noise):
        if clean is not None:
            return clean.cpu()
    raise AssertionError("a path needs at least one step")


def fewer_steps(full: int, steps: int, window: range | None) -> list[int]:
    """Select ``steps`` + 1 positions of a schedule of ``full`` steps.

    These are all positions up to the end of the window (None: of the path), then evenly spaced
    ones up to the end of the path. Raises ValueError if ``steps`` exceeds ``full`` or is too small
    for the window.
    """
    stop = full if window is None else window.stop
    left, remaining = steps - stop, full - stop
    if steps > full or left < min(remaining, 1):
        raise ValueError(
            f"{steps} steps to explore paths of {full} that are stochastic up to step {stop}: use"
            f" more than {min(stop, full - 1)}, up to {full}"
        )
    # k * remaining / left rounded half up, in integers: the same on every machine
    rest = (stop + (2 * k * remaining + left) // (2 * left) for k in range(1, left + 1))
    return [*range(stop + 1), *rest]


def _check(cond: Conditioning, noise_seeds: Sequence[int], path_seeds: Sequence[int]) -> None:
    if not len(cond) == len(noise_seeds) == len(path_seeds):
        raise ValueError(
            f"{len(noise_seeds)} noise seeds, {len(path_seeds)} path seeds and conditioning of"
            f" {len(cond)} rows: one of each per path"
        )


@dataclass(frozen=True)
class _PathSampler:
    """Sampling along ``sigmas``, by the solver within ``window`` and by Euler outside of it."""

    family: Family
    transformer: nn.Module
    solver: PathSolver
    sigmas: Tensor
    window: Container[int] | None
    guided: Guided | None

    def draws(self, j: int) -> bool:
        """Return True if step j is a stochastic step of the solver."""
        return self.window is None or j in self.window

    def noise(
        self, noise_seeds: Sequence[int], path_seeds: Sequence[int], steps: int
    ) -> tuple[Tensor, Tensor]:
        """Return (initial noises [B, *latent], noise of ``steps`` steps [B, steps, *latent])."""
        device, shape = next(self.transformer.parameters()).device, self.family.latent_shape
        initial, fresh = noise_for(noise_seeds, shape), noise_for(path_seeds, (steps, *shape))
        return initial.to(device), fresh.to(device)

    def steps(
        self, cond: Conditioning, x: Tensor, fresh: Tensor
    ) -> Iterator[tuple[int, Tensor, Step | None, Tensor | None]]:
        """Yield (j, next state, Gaussian, latents to decode) of each step j.

        The Gaussian is None for an Euler step, and the latents are None except in the last step.
        """
        parameter = next(self.transformer.parameters())
        part = cond.to(parameter.device, parameter.dtype)
        last = len(self.sigmas) - 2
        for j in range(last + 1):
            now, after = (self.sigmas[k].to(x.device).expand(len(x)) for k in (j, j + 1))
            before = x
            v = velocity(self.family, self.transformer, before, now, part, self.guided)
            gaussian = self.solver.step(before, v, now, after) if self.draws(j) else None
            if gaussian is None:
                # bit-identical to ``ode.euler``
                x = before + (self.sigmas[j + 1] - self.sigmas[j]).item() * v
            else:
                x = gaussian.mean + gaussian.std * fresh[:, j]
            yield j, x, gaussian, self.solver.decoded(before, v, now, x) if j == last else None
