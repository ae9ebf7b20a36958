"""Bytes that each actor holds, by what they are for."""

from __future__ import annotations

import torch

from configs.rewards import Scorer
from configs.schema import RunConfig
from learner.objectives import build_objective
from planning.counting import Counts, batch_of
from planning.placement import kinds_of
from policy import memory
from policy.families import Family
from rewards import model_bytes

Held = dict[str, dict[str, int | None]]


def held_of(
    config: RunConfig, counts: Counts, family: Family, backend: str, dtype: torch.dtype
) -> Held:
    """By service; a learner's is that of the replica with most prompts. None: not known."""
    held: Held = {}
    if config.plan.explore:
        held["rollout"] = _rollout(config, counts, backend)
    held["learner"] = _learner(config, counts, family, dtype)
    for kind in kinds_of(config):
        if labels := config.scorers_of(kind):
            chosen = [scorer for scorer in config.rewards.everyone if scorer.label in labels]
            held[kind] = {f"scorer {scorer.label}": _scorer(scorer) for scorer in chosen}
    held["encoder"] = {"text encoders": counts.text}
    return held


def _scorer(scorer: Scorer) -> int | None:
    """Bytes of a scorer's model, built once in a process."""
    key = scorer.model_dump_json()
    size = _built.get(key)
    if size is None and (size := model_bytes(scorer)) is not None:
        _built[key] = size
    return size


_built: dict[str, int] = {}


def _rollout(config: RunConfig, counts: Counts, backend: str) -> dict[str, int | None]:
    unquantized = backend == config.regenerate.precision
    return {
        f"denoiser, {backend}": counts.denoiser if unquantized else counts.rollout,
        "autoencoder, fp32": counts.autoencoder,
        f"passes, {batch_of(config)} images": max(counts.step.peak, counts.decode_peak),
    }


def _learner(
    config: RunConfig, counts: Counts, family: Family, dtype: torch.dtype
) -> dict[str, int | None]:
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
    sampled, points = config.regenerate.batch_size, config.optimizer.batch_size
    per_prompt = memory.conditioning_bytes(family, dtype, bool(config.guidance.stages))
    replicas = config.services.learner.replicas
    prompts = -(-config.prompts.per_iteration // replicas)  # of the replica that has most
    held: dict[str, int | None] = {
        f"denoiser, {config.regenerate.precision}": counts.denoiser,
        "autoencoder, fp32": counts.autoencoder,
        f"{len(adapters)} adapters, fp32": len(adapters) * counts.trained * 4,
        "optimiser, fp32": 2 * counts.trained * 4,
        "conditioning": prompts * per_prompt,
        f"passes, {sampled} images or {points} points": max(
            counts.adapted.peak, counts.decode_again, counts.training.peak
        ),
    }
    if replicas > 1:
        held["sum of gradients, fp32"] = counts.trained * 4
    return held
