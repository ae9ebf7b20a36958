"""Operations of an iteration's parts, from what single passes take (``planning.counting``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from configs.objective import PathSettings
from configs.schema import RunConfig
from configs.sections import Model
from learner.objectives import build_objective
from planning.assumptions import Device
from planning.counting import Counts, batch_of, on_gpus
from policy.decoders import proxy_dtype
from policy.precision.backends import BACKENDS


@dataclass(frozen=True)
class Stage:
    """Operations of a part of an iteration, over all its actors.

    ``decoding`` runs at the share ``decoding_rate`` of BF16's peak: half of it in TF32.
    """

    unquantized: float
    quantised: float = 0.0
    decoding: float = 0.0
    decoding_rate: float = 0.5
    gpus: float = 1.0  # of all its actors; none uses more than one

    @property
    def flops(self) -> float:
        """All operations."""
        return self.unquantized + self.quantised + self.decoding

    def seconds(self, device: Device) -> float:
        """Seconds that it takes on its GPUs."""
        at = (
            self.unquantized / device.tflops
            + self.quantised / device.quantised_tflops
            + self.decoding / (device.tflops * self.decoding_rate)
        )
        return at / (1e12 * device.utilisation * self.gpus)


def stages_of(config: RunConfig, counts: Counts) -> tuple[dict[str, Stage], Stage]:
    """Explore, regenerate and update of an iteration, and an evaluation.

    Nothing is quantised for an arm that explores at full precision.
    """
    prompts, plan, full = config.prompts.per_iteration, config.plan, config.regenerate
    rollout, learner, scales = config.services.rollout, config.services.learner, config.guidance
    step, adapted = (work.flops / full.batch_size for work in (counts.merged, counts.adapted))
    mine = learner.count * (min(1.0, learner.gpus) or 1.0)
    stages: dict[str, Stage] = {}
    small, whole = config.explored_model, config.model
    area = pixels(small) / pixels(whole)
    if plan.explore is not None:
        images = prompts * plan.explore.pool_size
        calls = images * plan.explore.steps / batch_of(config) * passes(plan.explore.guidance)
        backend = BACKENDS.get(plan.explore.backend)  # None: "auto", which quantises
        narrow = proxy_dtype(config, on_gpus(config, rollout)) == torch.bfloat16
        quantised = counts.step.quantised if backend is None or backend.quantises else 0
        stages["explore"] = Stage(
            unquantized=calls * (counts.step.flops - quantised),
            quantised=calls * quantised,
            decoding=images * counts.proxy_flops * area,
            decoding_rate=1.0 if narrow else 0.5,
            gpus=rollout.actors * (min(1.0, rollout.gpus) or 1.0),
        )
    if plan.regenerate:
        images = prompts * (config.selection.keep + config.audit.random_seeds)
        objective = build_objective(config.objective, config.stop.max_kl is not None)
        # paths are drawn with adapters beside the weights
        one = adapted if objective.path_solver or config.lora.base != "full" else step
        stages["regenerate"] = Stage(
            images * full.steps * one * passes(scales.regenerate),
            decoding=images * counts.decode_flops,
            gpus=mine,
        )
    points, others = training_points(config)
    trained = counts.training.flops / config.optimizer.batch_size
    stages["update"] = Stage(
        prompts
        * config.selection.keep
        * points
        * (trained + others * adapted)
        * passes(scales.train),
        gpus=mine,
    )
    images = config.evaluate.prompts * config.evaluate.noises
    return stages, Stage(
        images * config.evaluate.steps * step * passes(scales.evaluate),
        decoding=images * counts.decode_flops,
        gpus=mine,
    )


def pixels(model: Model) -> int:
    """Pixels of an image, or of all frames of a clip."""
    return model.height * model.width * (model.frames or 1)


def passes(guidance: float) -> int:
    """Velocities per step at a scale of classifier-free guidance."""
    return 1 if guidance == 1 else 2


def training_points(config: RunConfig) -> tuple[int, float]:
    """(training points of each sample, forward passes of each point beside the trained one).

    Where the sampling policy is a copy of the trained one, its pass is saved until the first
    optimiser step of an iteration.
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
