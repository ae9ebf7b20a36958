"""Sampling at full precision with any of the learner's adapters, to regenerate and to evaluate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from configs.objective import PathSettings
from configs.schema import RunConfig
from learner.lockstep import Passes
from learner.objectives.base import Objective, Record
from learner.replicas import Replicas
from policy.attention import without_cudnn_attention
from policy.decoders import decoder_on
from policy.families import Family
from policy.lora import use_adapter
from policy.merging import merged
from policy.precision.compiling import compile_failures, compiled
from policy.sampling.guidance import Guided
from policy.sampling.paths import PathPlan, sample_paths
from policy.sampling.sample import sample
from policy.sampling.sde import PathSolver
from policy.types import Conditioning

COMPILE = "regenerate.compile"


class Generator:
    """Generates samples and images of seeds by a denoiser with adapters.

    If the base is sharded, all ``replicas`` run every pass together.
    """

    def __init__(
        self,
        config: RunConfig,
        family: Family,
        transformer: nn.Module,
        vae: nn.Module,
        objective: Objective,
        adapters: Sequence[str],
        device: torch.device,
        sharded: bool,
    ) -> None:
        self.config, self.family = config, family
        self.transformer, self.objective, self.adapters = transformer, objective, adapters
        self.replicas, self.sharded, self.device = Replicas(), sharded, device
        self.updates = 0  # number of updates, on which the window of a path's steps depends
        self._denoiser = (
            compiled(transformer, device, COMPILE) if config.regenerate.compile else transformer
        )
        self._decoder = decoder_on(device, vae, config.regenerate.compile)
        self._passes = Passes(family, transformer, device)

    def generate(
        self,
        cond: Conditioning,
        seeds: Sequence[int],
        steps: int | None = None,
        weights: str | None = None,
        solver: str | None = None,
        batch_size: int | None = None,
        guidance: float | None = None,
        start: int | None = None,
    ) -> tuple[Record, np.ndarray]:
        """Generate K seeds; return (samples, images as from ``Family.decode``).

        Samples have "latents" float32 [K, *latent]. With the objective's stochastic solver they
        also have "states" float32 [K, T + 1, *latent] and "log_probs" float32 [K, T], and with a
        window "stochastic" float32 [K, T], which is 1 inside of it. ``cond`` has one row for all
        seeds, or K rows. ``weights`` is "current", "old", "ema" or "base" (adapters disabled); None
        is the sampling policy. Other defaults are those of ``[regenerate]``. Paths start at the
        noise of the seed ``start``, or each at the noise of its own seed.

        The adapter is merged into the weights in their precision, with two exceptions: paths, whose
        density must be that of the trained policy, which merging would round; and weights that
        ``lora.base`` packs.
        """
        settings = self.config.regenerate
        size, scales = batch_size or settings.batch_size, self.config.guidance
        guided = Guided.at(scales, scales.regenerate if guidance is None else guidance)
        rows = cond.repeat(len(seeds)) if len(cond) == 1 else cond
        steps, (name, how) = steps or settings.steps, self._way(weights, solver)
        velocities = 2 if guided is not None and not guided.one_pass else 1
        with self._going(name, how, velocities * steps * -(-len(seeds) // size)):
            samples = self._sample(rows, list(seeds), steps, how, size, guided, start)
        # only after the merged weights are freed, to limit the peak of memory
        with torch.no_grad(), compile_failures(COMPILE):
            images = self.family.decode(self._decoder, samples["latents"], batch_size=size)
        return {key: tensor.numpy() for key, tensor in samples.items()}, images.numpy()

    def stand_by(self, weights: str | None = None, solver: str | None = None) -> None:
        """Take part in the passes while other replicas ``generate`` with these arguments.

        With a sharded base they cannot run a pass without this replica.
        """
        with self._going(*self._way(weights, solver), 0):
            pass

    def _way(self, weights: str | None, solver: str | None) -> tuple[str, PathSolver | str]:
        """Return (name of the weights, solver) for the arguments of ``generate``."""
        name = self.objective.sampling_adapter if weights is None else weights
        if name != "base" and name not in self.adapters:
            raise ValueError(
                f"unknown weights {name!r}: use one of {', '.join((*self.adapters, 'base'))}"
            )
        solver, paths = solver or self.config.plan.solver, self.objective.path_solver
        return name, paths if paths is not None and paths.name == solver else solver

    @contextmanager
    def _going(self, name: str, how: PathSolver | str, passes: int) -> Iterator[None]:
        """Activate the weights ``name`` in the context, for ``passes`` calls of the denoiser."""
        merges = isinstance(how, str) and self.config.lora.base == "full"
        what = f"{name}, {'merged' if merges else 'beside'}"
        with (
            torch.no_grad(),
            nullcontext() if merges else without_cudnn_attention(self.device),
            (merged if merges else use_adapter)(self.transformer, None if name == "base" else name),
            compile_failures(COMPILE),
            self._passes.together(self.replicas, what, passes) if self.sharded else nullcontext(),
        ):
            yield

    def _sample(
        self,
        rows: Conditioning,
        seeds: list[int],
        steps: int,
        solver: PathSolver | str,
        size: int,
        guided: Guided | None,
        start: int | None,
    ) -> dict[str, Tensor]:
        """Return the samples of ``generate``."""
        family, denoiser = self.family, self._denoiser
        if isinstance(solver, str):
            return {"latents": sample(family, denoiser, rows, seeds, steps, solver, size, guided)}
        settings = self.config.objective
        assert isinstance(settings, PathSettings)
        plan = PathPlan.of(settings, steps, self.updates, self.config.seed)
        starts, streams = plan.noise_of(seeds, start)
        drawn = sample_paths(
            family, denoiser, rows, starts, streams, steps, solver, size, guided, plan.window
        )
        samples = {"latents": drawn.latents, "states": drawn.states, "log_probs": drawn.log_probs}
        return samples if plan.window is None else samples | {"stochastic": drawn.stochastic}
