"""Paths of stochastic solvers: those that are trained on, and cheap ones that have their noise."""

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
    """What paths of an objective are in one iteration; the seeds of images then name them."""

    solver: PathSolver
    steps: int  # T
    run_seed: int
    window: range | None  # steps that are stochastic; None: all

    @classmethod
    def of(cls, settings: PathSettings, steps: int, done: int, run_seed: int) -> PathPlan:
        """Paths of ``steps`` steps after ``done`` iterations."""
        solver = PathSolver(settings.solvers[0], settings.eta)
        moved = settings.window is not None
        return cls(
            solver, steps, run_seed, settings.window_at(steps, done, run_seed) if moved else None
        )

    def noise_of(self, seeds: Sequence[int], start: int | None) -> tuple[list[int], list[int]]:
        """(the seed of each initial noise, that of each path's own noise). ``start`` is the one
        initial noise of all; None: an image's seed is that of its initial noise.
        """
        starts = list(seeds) if start is None else [start] * len(seeds)
        return starts, [stream_seed(self.run_seed, "sde", seed) for seed in seeds]


def explored_paths(config: RunConfig, solver: str, iteration: int) -> PathPlan | None:
    """The paths that ``solver`` explores in an iteration; None: it is a deterministic one."""
    settings = config.objective
    if solver not in STOCHASTIC or not isinstance(settings, PathSettings):
        return None
    return PathPlan.of(settings, config.regenerate.steps, iteration, config.seed)


def shared_start(config: RunConfig, seeds: Sequence[int]) -> int | None:
    """The seed whose initial noise all paths of a prompt start from; None: each from its own."""
    return seeds[0] if config.objective.one_noise_per_group else None


@dataclass(frozen=True)
class Paths:
    """B sampled paths of T steps, on the CPU."""

    states: Tensor  # float32 [B, T + 1, *latent], from the initial noise to the latents at sigma 0
    log_probs: Tensor  # float32 [B, T], of the step from state j to state j + 1
    latents: Tensor  # float32 [B, *latent], what is decoded: ``PathSolver.decoded``
    stochastic: Tensor  # float32 [B, T], 1 for a step of the solver, 0 for one of Euler


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
    """Row i starts from the noise of ``noise_seeds[i]``; ``path_seeds[i]`` is that of its steps.

    cond has B rows; ``batch_size`` paths go through the transformer at a time, None means all.
    Steps outside of ``window`` are Euler's, x + dsigma v, with a log-probability of 0; None: all
    are the solver's. Noise depends on a row's own seeds and on ``steps`` alone. Raises ValueError
    when rows and seeds differ.
    """
    _check(cond, noise_seeds, path_seeds)
    size = batch_size or max(len(noise_seeds), 1)
    states = torch.empty((len(noise_seeds), steps + 1, *family.latent_shape))
    log_probs = torch.zeros((len(noise_seeds), steps))
    latents = torch.empty((len(noise_seeds), *family.latent_shape))
    walk = _Walk(family, transformer, solver, family.sigmas(steps), window, guided)
    for first in range(0, len(noise_seeds), size):
        rows = slice(first, first + size)
        begin, fresh = walk.noise(noise_seeds[rows], path_seeds[rows], steps)
        states[rows, 0] = begin.cpu()
        for j, x, drawn, clean in walk.steps(cond.rows(rows), begin, fresh):
            states[rows, j + 1] = x.cpu()
            if drawn is not None:
                log_probs[rows, j] = drawn.log_prob(x).cpu()
            if clean is not None:
                latents[rows] = clean.cpu()
    stochastic = torch.tensor([walk.draws(j) for j in range(steps)], dtype=torch.float32)
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
    """Where paths of ``plan`` end, at less cost: latents float32 [B, *latent] on the CPU.

    Up to the end of the window the steps and their noise are the path's own, so that what they
    decide is seen; the rest is Euler's in ``steps`` less those (``fewer_steps``). One batch.
    Raises ValueError when rows and seeds differ, or no ``steps`` are left.
    """
    starts, streams = plan.noise_of(seeds, start)
    _check(cond, starts, streams)
    taken = fewer_steps(plan.steps, steps, plan.window)
    schedule = family.sigmas(plan.steps)[taken]
    walk = _Walk(family, transformer, plan.solver, schedule, plan.window, guided)
    # noise for all steps of the path, though fewer are taken: step j must get what it gets there
    begin, fresh = walk.noise(starts, streams, plan.steps)
    for *_, clean in walk.steps(cond, begin, fresh):
        if clean is not None:
            return clean.cpu()
    raise AssertionError("a path has a last step")


def fewer_steps(full: int, steps: int, window: range | None) -> list[int]:
    """Positions [steps + 1] of a schedule of ``full`` steps: all of them up to the end of the
    window (None: of the path), then evenly spread ones to its end.

    Raises ValueError where these are more steps, or more than there are.
    """
    stop = full if window is None else window.stop
    left, apart = steps - stop, full - stop
    if steps > full or left < min(apart, 1):
        raise ValueError(
            f"{steps} steps to explore paths of {full} that are stochastic up to step {stop}: use"
            f" more than {min(stop, full - 1)}, up to {full}"
        )
    # k apart / left rounded half up, in integers: the same on every machine
    rest = (stop + (2 * k * apart + left) // (2 * left) for k in range(1, left + 1))
    return [*range(stop + 1), *rest]


def _check(cond: Conditioning, noise_seeds: Sequence[int], path_seeds: Sequence[int]) -> None:
    if not len(cond) == len(noise_seeds) == len(path_seeds):
        raise ValueError(
            f"{len(noise_seeds)} noise seeds, {len(path_seeds)} path seeds and conditioning of"
            f" {len(cond)} rows: one of each per path"
        )


@dataclass(frozen=True)
class _Walk:
    """Goes down ``sigmas``, by the solver in ``window`` and by Euler outside of it."""

    family: Family
    transformer: nn.Module
    solver: PathSolver
    sigmas: Tensor
    window: Container[int] | None
    guided: Guided | None

    def draws(self, j: int) -> bool:
        """Whether step j is the solver's."""
        return self.window is None or j in self.window

    def noise(
        self, noise_seeds: Sequence[int], path_seeds: Sequence[int], steps: int
    ) -> tuple[Tensor, Tensor]:
        """(initial noises [B, *latent], noise of so many steps [B, steps, *latent])."""
        home, shape = next(self.transformer.parameters()).device, self.family.latent_shape
        begin, fresh = noise_for(noise_seeds, shape), noise_for(path_seeds, (steps, *shape))
        return begin.to(home), fresh.to(home)

    def steps(
        self, cond: Conditioning, x: Tensor, fresh: Tensor
    ) -> Iterator[tuple[int, Tensor, Step | None, Tensor | None]]:
        """Of each step j: (j, where it arrives, its Gaussian if it has one, and in the last step
        the latents to decode).
        """
        parameter = next(self.transformer.parameters())
        part = cond.to(parameter.device, parameter.dtype)
        last = len(self.sigmas) - 2
        for j in range(last + 1):
            now, after = (self.sigmas[k].to(x.device).expand(len(x)) for k in (j, j + 1))
            before = x
            v = velocity(self.family, self.transformer, before, now, part, self.guided)
            drawn = self.solver.step(before, v, now, after) if self.draws(j) else None
            if drawn is None:
                # as ``ode.euler`` computes it, to the bit
                x = before + (self.sigmas[j + 1] - self.sigmas[j]).item() * v
            else:
                x = drawn.mean + drawn.std * fresh[:, j]
            yield j, x, drawn, self.solver.decoded(before, v, now, x) if j == last else None
