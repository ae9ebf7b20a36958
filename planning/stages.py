"""Work of the stages of an iteration, from the counts of single passes (``planning.counting``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from configs.objective import PathSettings
from configs.schema import RunConfig
from configs.sections import Model
from learner.objectives import build_objective
from planning.assumptions import Device
from planning.counted_parts import batch_of, on_gpus
from planning.counting import Counts
from policy.decoders import proxy_dtype
from policy.precision.backends import BACKENDS
from policy.precision.cost import COMPILED, Step, seconds


@dataclass(frozen=True)
class Part:
    """A number of calls of one kind of denoiser pass; ``quantized``: with quantized layers.

    ``known`` is the share of them that pack activations by the amax of the previous pass.
    """

    calls: float
    step: Step
    quantized: bool = False
    compiled: bool = False
    known: float = 0.0

    def seconds(self, device: Device) -> float:
        """Return the seconds of all calls, one after the other."""
        rates = device.rates(self.quantized)
        return self.calls * seconds(self.step, rates, compiled=self.compiled, known=self.known)


@dataclass(frozen=True)
class Stage:
    """Passes and operations of one stage of an iteration, summed over all its actors.

    ``narrow``: images are decoded in BF16, else in FP32. ``compiled``: the decoder is compiled.
    """

    parts: Sequence[Part]
    decoding: float = 0.0
    narrow: bool = False
    compiled: bool = False
    gpus: float = 1.0  # GPUs of all its actors; an actor uses one at most

    @property
    def denoising(self) -> float:
        """Operations of the denoiser, quantized ones included."""
        return sum(part.calls * part.step.flops for part in self.parts)

    @property
    def quantized(self) -> float:
        """Operations of the denoiser in quantized layers."""
        return sum(part.calls * part.step.quantized for part in self.parts if part.quantized)

    @property
    def flops(self) -> float:
        """Operations of denoising and decoding."""
        return self.denoising + self.decoding

    def seconds(self, device: Device) -> float:
        """Return the seconds of the stage, spread evenly over its GPUs."""
        busy = sum(part.seconds(device) for part in self.parts)
        bf16, fp32 = device.rates().decoding
        decoding = self.decoding / (bf16 if self.narrow else fp32)
        return (busy + decoding * (COMPILED["decoder"] if self.compiled else 1.0)) / self.gpus


def stages_of(config: RunConfig, counts: Counts) -> tuple[dict[str, Stage], Stage]:
    """Return (the stages explore, regenerate and update of an iteration, an evaluation).

    A stage that the arm does not have is left out. Nothing is quantized for an arm that explores at
    full precision.
    """
    prompts, plan, full = config.prompts.per_iteration, config.plan, config.regenerate
    learner, scales = config.services.learner, config.guidance
    learner_gpus = learner.count * (min(1.0, learner.gpus) or 1.0)
    stages: dict[str, Stage] = {}

    def merged(images: float, guidance: float) -> Part:
        calls = images / full.batch_size * passes(guidance)
        return Part(calls, counts.merged, compiled=full.compile)

    def adapted(images: float, guidance: float, compiled: bool) -> Part:
        calls = images / full.batch_size * passes(guidance)
        return Part(calls, counts.adapted, compiled=compiled)

    def drawing(part: Part, images: float) -> Stage:
        compiled = full.compile and on_gpus(config, learner) and not counts.decode_eager
        return Stage([part], images * counts.decode_flops, compiled=compiled, gpus=learner_gpus)

    if plan.explore is not None:
        stages["explore"] = _exploring(config, counts)
    if plan.regenerate:
        images = prompts * (config.selection.keep + config.audit.random_seeds)
        objective = build_objective(config.objective, config.stop.max_kl is not None)
        # paths are sampled with the adapter unmerged
        unmerged = objective.path_solver or config.lora.base != "full"
        count, scale = images * full.steps, scales.regenerate
        part = adapted(count, scale, full.compile) if unmerged else merged(count, scale)
        stages["regenerate"] = drawing(part, images)
    points, others = training_points(config)
    trained = prompts * config.selection.keep * points
    calls = trained / config.optimizer.batch_size * passes(scales.train)
    compiled = config.optimizer.compile
    parts = [
        Part(calls, counts.training, compiled=compiled),
        adapted(trained * others, scales.train, compiled),
    ]
    stages["update"] = Stage(parts, gpus=learner_gpus)
    images = config.evaluate.prompts * config.evaluate.noises
    return stages, drawing(merged(images * config.evaluate.steps, scales.evaluate), images)


def _exploring(config: RunConfig, counts: Counts) -> Stage:
    """Return the explore stage of a configuration that explores."""
    explore, rollout = config.plan.explore, config.services.rollout
    assert explore is not None
    images = config.prompts.per_iteration * explore.pool_size
    calls = images * explore.steps / batch_of(config) * passes(explore.guidance)
    backend = BACKENDS.get(explore.backend)  # None: "auto", which quantizes
    quantized = backend is None or backend.quantizes
    previous = config.explore.activation_amax == "previous_pass"
    known = 1 - 1 / explore.steps if previous else 0.0
    area = pixels(config.explored_model) / pixels(config.model)
    gpu, full_decoder = on_gpus(config, rollout), config.explore.decoder == "full"
    return Stage(
        [Part(calls, counts.step, quantized, config.explore.compile, known)],
        decoding=images * counts.proxy_flops * area,
        narrow=proxy_dtype(config, gpu) == torch.bfloat16,
        compiled=config.explore.compile and gpu and not (counts.decode_eager and full_decoder),
        gpus=rollout.actors * (min(1.0, rollout.gpus) or 1.0),
    )


def pixels(model: Model) -> int:
    """Return the pixels of an image, or of all frames of a clip."""
    return model.height * model.width * (model.frames or 1)


def passes(guidance: float) -> int:
    """Return the velocities per step at a scale of classifier-free guidance: 1 or 2."""
    return 1 if guidance == 1 else 2


def training_points(config: RunConfig) -> tuple[int, float]:
    """Return (training points per sample, forward passes per point besides the trained one).

    If the sampling policy is a copy of the trained one, its pass is saved up to the first optimizer
    step of an iteration.
    """
    objective: Any = build_objective(config.objective, config.stop.max_kl is not None)
    steps = config.regenerate.steps
    if isinstance(config.objective, PathSettings):
        window = config.objective.window_at(steps)
        count = len(objective.steps(steps, np.random.default_rng(0), window))
    else:
        count = objective.settings.times_per_sample
    others = float(len(set(objective.policies) - {"current"}))
    old = config.resolved_old_policy
    if "old" in objective.policies and old.schedule == "constant" and not old.value:
        others -= 1 / config.optimizer.steps_per_iteration
    return count, others
