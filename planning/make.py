"""``sol-rl plan``: what a run needs and how long an iteration may take, with nothing loaded.

Sizes and operations are counted on the architecture (``policy.memory``); where actors would go is
asked of ``planning.placement``. Seconds are operations over an assumed share of an assumed peak,
and nothing else: scoring, transfers and publishing are not in them.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.load import ConfigError
from configs.schema import RunConfig
from learner.objectives import build_objective
from planning.assumptions import Assumptions, Device, backend_of, device_of, with_format
from planning.placement import Node, NoRoom, kinds_of, needs_of, place
from policy import memory
from policy.families import Family, family_for
from policy.families.architectures import published, published_names, write_configs
from policy.lora import target_modules
from policy.memory import Work
from policy.precision.backends import Backend
from policy.precision.swap import ModuleRow
from policy.types import DTYPES
from rewards import model_bytes

MOST_NODES = 64
GB = 1e9
NUMBERS = {2: "two", 3: "three"}


@dataclass(frozen=True)
class Stage:
    """Operations of a part of an iteration, over all its actors; ``decoding`` is in FP32."""

    unquantized: float
    quantised: float = 0.0
    decoding: float = 0.0
    gpus: float = 1.0  # of all its actors; none uses more than one

    @property
    def flops(self) -> float:
        """All of them."""
        return self.unquantized + self.quantised + self.decoding

    def seconds(self, device: Device) -> float:
        """On its GPUs. Decoding runs in TF32, at half the BF16 peak."""
        at = (
            self.unquantized / device.tflops
            + self.quantised / device.quantised_tflops
            + self.decoding / (device.tflops / 2)
        )
        return at / (1e12 * device.utilisation * self.gpus)


@dataclass(frozen=True)
class Plan:
    """All that ``lines`` prints, in bytes; ``memory`` is per actor of a kind, by purpose."""

    config: RunConfig
    source: str
    backend: str
    why: str
    quantised_weights: int
    all_weights: int
    trained: int
    memory: dict[str, dict[str, int | None]]
    broadcast: int
    store: dict[str, int]
    stages: dict[str, Stage]
    evaluation: Stage
    device: Device | None
    nodes: Sequence[Node] = ()
    placed: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None  # why there is no placement


def make_plan(
    config: RunConfig, given: Assumptions | None = None, nodes: Sequence[Node] | None = None
) -> Plan:
    """The plan of a run on ``nodes``, or on as few assumed ones as do. Loads no weights. Raises
    ConfigError.
    """
    given = given or Assumptions()
    try:
        with described(config) as (family, source):
            return _plan(config, family, source, given, nodes)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError([str(error)]) from None


@contextmanager
def described(config: RunConfig) -> Iterator[tuple[Family, str]]:
    """(family, where its architecture comes from), the published one for a known hub id."""
    model = config.model
    names = [
        name
        for name in published_names()
        if published(name)["hub_id"] == model.path and not Path(model.path).exists()
    ]
    with tempfile.TemporaryDirectory(prefix="sol-rl-plan-") as scratch:
        if names:
            model = model.model_copy(update={"path": str(write_configs(names[0], scratch))})
        family = family_for(model)
        family.check()
        yield (
            family,
            (f"published architecture {names[0]}" if names else "its own configuration files"),
        )


def _plan(
    config: RunConfig, family: Family, source: str, given: Assumptions, nodes: Sequence[Node] | None
) -> Plan:
    device, accelerator = device_of(config, given)
    backend, why = backend_of(config, accelerator)
    dtype = DTYPES[config.regenerate.precision]
    text_bytes = memory.held_bytes(*memory.text_encoders(family, dtype).values())
    base = memory.blank(family, "transformer", dtype)
    adapted = target_modules(
        base, config.lora.targets or family.lora_targets, strict=bool(config.lora.targets)
    )
    explored, decoded = _explorer(config, family, backend, base, adapted, dtype)
    all_weights = sum(parameter.numel() for parameter in base.parameters())
    learner, trained, passes = _learner(config, family, base, dtype)
    held: dict[str, dict[str, int | None]] = (
        {"rollout": explored.memory} if config.plan.explore else {}
    )
    held["learner"] = learner
    for kind in kinds_of(config):
        if labels := config.scorers_of(kind):
            chosen = [scorer for scorer in config.rewards.everyone if scorer.label in labels]
            held[kind] = {f"scorer {scorer.label}": model_bytes(scorer) for scorer in chosen}
    held["encoder"] = {"text encoders": text_bytes}
    broadcast = explored.broadcast if config.plan.explore else 0
    if device is not None and given.quantised_peak_tflops is None:
        device = with_format(device, accelerator, backend)
    stages, evaluation = _stages(config, explored, decoded, passes)
    there, placed, problem = _placement(config, given, accelerator, nodes)
    return Plan(
        config=config,
        source=source,
        backend=backend.name,
        why=why,
        quantised_weights=explored.quantised_weights,
        all_weights=all_weights,
        trained=trained,
        memory=held,
        broadcast=broadcast,
        store=_store(config, family, broadcast, dtype),
        stages=stages,
        evaluation=evaluation,
        device=device,
        nodes=there,
        placed=placed,
        problem=problem,
    )


# ---- what actors hold


@dataclass(frozen=True)
class _Explored:
    memory: dict[str, int | None]
    broadcast: int
    quantised_weights: int
    step: Work  # of explore.chunk_size images
    batch: int


def _explorer(
    config: RunConfig,
    family: Family,
    backend: Backend,
    base: torch.nn.Module,
    adapted: Sequence[str],
    dtype: torch.dtype,
) -> tuple[_Explored, Work]:
    """What an explorer holds and does, and the work of decoding one image."""
    batch = min(config.explore.chunk_size, config.explore.pool_size)
    transformer, rows, layers = memory.blank_explorer(
        family, backend, config.explore.modules_to_not_convert, dtype
    )
    quantised = [row.name for row in rows if row.quantised]
    step = memory.sampling_work(family, base, batch, dtype, quantised)
    vae, decode = memory.decoding_work(family, batch)
    held: dict[str, int | None] = {
        f"denoiser, {backend.name}": memory.held_bytes(transformer),
        "autoencoder, fp32": vae,
        f"passes, {batch} images": max(step.peak, decode.peak),
    }
    broadcast = memory.wire_bytes(transformer, rows, layers, adapted, backend)
    one = Work(decode.flops // batch, 0, decode.peak)
    return _Explored(held, broadcast, _weights(rows), step, batch), one


def _weights(rows: Sequence[ModuleRow]) -> int:
    return sum(int(np.prod(row.shape)) for row in rows if row.quantised)


@dataclass(frozen=True)
class _Passes:
    sampling: Work
    training: Work
    sampled: int  # images of `sampling`
    points: int  # training points of `training`


def _learner(
    config: RunConfig, family: Family, transformer: torch.nn.Module, dtype: torch.dtype
) -> tuple[dict[str, int | None], int, _Passes]:
    """(bytes by purpose, trained parameters, work) of a replica; adds LoRA to ``transformer``."""
    objective = build_objective(config.objective, config.stop.max_kl is not None)
    adapters = {
        objective.sampling_adapter,
        *objective.policies,
        *objective.averages,
        "ema",
        "current",
    } - {"ref"}
    if config.explore_ahead:
        adapters.add("previous")
    base = memory.held_bytes(transformer)
    trained = memory.adapt(transformer, family, config.lora)
    sampled, points = config.regenerate.batch_size, config.optimizer.batch_size
    sampling = memory.sampling_work(family, transformer, sampled, dtype)
    vae, decode = memory.decoding_work(family, sampled)
    training = memory.training_work(
        family, transformer, points, dtype, config.optimizer.gradient_checkpointing
    )
    per_prompt = memory.conditioning_like(family, 1, dtype)
    replicas = config.services.learner.replicas
    prompts = -(-config.prompts.per_iteration // replicas)  # of the replica that has most
    held: dict[str, int | None] = {
        f"denoiser, {config.regenerate.precision}": base,
        "autoencoder, fp32": vae,
        f"{len(adapters)} adapters, fp32": len(adapters) * trained * 4,
        "optimiser, fp32": 2 * trained * 4,
        "conditioning": (
            prompts * sum(t.numel() * t.element_size() for t in per_prompt.tensors.values())
        ),
        f"passes, {sampled} images or {points} points": max(
            sampling.peak, decode.peak, training.peak
        ),
    }
    if replicas > 1:
        held["sum of gradients, fp32"] = trained * 4
    return held, trained, _Passes(sampling, training, sampled, points)


def _store(config: RunConfig, family: Family, broadcast: int, dtype: torch.dtype) -> dict[str, int]:
    """The most that an iteration puts into the object stores, with one copy of each object."""
    prompts, keep = config.prompts.per_iteration, config.selection.keep
    image, latent = (
        3 * config.model.height * config.model.width,
        4 * int(np.prod(family.latent_shape)),
    )
    explored = config.plan.explore.pool_size if config.plan.explore else 0
    regenerated = (keep + config.audit.random_seeds) if config.plan.regenerate else 0
    objective = build_objective(config.objective, config.stop.max_kl is not None)
    states = (
        config.regenerate.steps + 2 if objective.path_solver else 1
    )  # the path with its start, and the latents themselves
    kept = regenerated * states + (0 if config.plan.regenerate else explored)
    conditioning = memory.conditioning_like(family, 1, dtype).tensors.values()
    return {
        f"{NUMBERS[versions_held(config)]} versions of the weights, per node with explorers": (
            versions_held(config) * broadcast
        ),
        "images of an iteration, were none scored yet": (
            prompts * (explored + regenerated) * image
        ),
        "samples to train on": prompts * kept * latent,
        "conditioning": (
            prompts * sum(tensor.numel() * tensor.element_size() for tensor in conditioning)
        ),
    }


SPILLS_AT = 0.8
"""Share of an object store from which on Ray writes objects to disk
(``RAY_object_spilling_threshold``).
"""


def versions_held(config: RunConfig) -> int:
    """Versions that a store holds at once: the newest, those chunks may name, the next one."""
    return 2 + config.explore_ahead


def store_size(held: int) -> int:
    """Bytes to start a node's object store with: ``held`` and a tenth more for images and
    samples, all below the share from which on Ray spills to disk, in whole 100 MB.
    """
    step = 10**8
    return math.ceil(held * 1.1 / SPILLS_AT / step) * step


# ---- operations


def _stages(
    config: RunConfig, explored: _Explored, decode: Work, passes: _Passes
) -> tuple[dict[str, Stage], Stage]:
    """Explore, regenerate and update of an iteration, and an evaluation."""
    prompts, plan, full = config.prompts.per_iteration, config.plan, config.regenerate
    step, rollout, learner = (
        passes.sampling.flops / passes.sampled,
        config.services.rollout,
        config.services.learner,
    )
    mine = learner.count * (min(1.0, learner.gpus) or 1.0)
    stages: dict[str, Stage] = {}
    if plan.explore is not None:
        images = prompts * plan.explore.pool_size
        calls = images * plan.explore.steps / explored.batch
        stages["explore"] = Stage(
            unquantized=calls * (explored.step.flops - explored.step.quantised),
            quantised=calls * explored.step.quantised,
            decoding=images * decode.flops,
            gpus=rollout.actors * (min(1.0, rollout.gpus) or 1.0),
        )
    if plan.regenerate:
        images = prompts * (config.selection.keep + config.audit.random_seeds)
        stages["regenerate"] = Stage(
            images * full.steps * step, decoding=images * decode.flops, gpus=mine
        )
    points, others = training_points(config)
    trained = passes.training.flops / passes.points
    stages["update"] = Stage(
        prompts * config.selection.keep * points * (trained + others * step), gpus=mine
    )
    images = config.evaluate.prompts * config.evaluate.noises
    return stages, Stage(
        images * config.evaluate.steps * step, decoding=images * decode.flops, gpus=mine
    )


def training_points(config: RunConfig) -> tuple[int, float]:
    """(training points of each sample, forward passes of each point beside the trained one).

    Where the sampling policy is a copy of the trained one, its pass is saved until the first
    optimiser step of an iteration.
    """
    objective: Any = build_objective(config.objective, config.stop.max_kl is not None)
    steps = config.regenerate.steps
    count = (
        len(objective.steps(steps, np.random.default_rng(0)))
        if objective.path_solver
        else objective.settings.times_per_sample
    )
    others = float(len(set(objective.policies) - {"current"}))
    old = config.resolved_old_policy
    if "old" in objective.policies and old.schedule == "constant" and not old.value:
        others -= 1 / config.optimizer.steps_per_iteration
    return count, others


# ---- placement


def _placement(
    config: RunConfig, given: Assumptions, accelerator: str | None, nodes: Sequence[Node] | None
) -> tuple[Sequence[Node], Mapping[str, str], str | None]:
    """(nodes, node id by actor, None), or why there is none. Without ``nodes``: as few as do of
    those assumed.
    """
    needs = needs_of(config)
    if nodes is not None:
        try:
            return nodes, place(needs, nodes), None
        except NoRoom as error:
            return nodes, {}, str(error)
    labels = {"ray.io/accelerator-type": accelerator} if accelerator else {}
    problem = ""
    for count in range(1, MOST_NODES + 1):
        assumed = [
            Node(f"node {i + 1}", given.node_cpus, given.node_gpus if accelerator else 0, labels)
            for i in range(count)
        ]
        try:
            return assumed, place(needs, assumed), None
        except NoRoom as error:
            problem = problem or str(error)
    return [], {}, problem
