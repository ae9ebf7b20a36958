"""Memory of each actor in bytes, by purpose."""

from __future__ import annotations

import math

import torch

from configs.rewards import Scorer
from configs.schema import RunConfig
from learner.averages import adapters_of
from learner.objectives import build_objective
from planning import sizes
from planning.counted_parts import batch_of, on_gpus
from planning.counting import Counts
from planning.layouts.costs import Parts
from planning.placement import kinds_of
from policy.decoders import proxy_dtype
from policy.families import Family
from policy.precision.backends import BACKENDS
from rewards import model_bytes

Held = dict[str, dict[str, int | None]]


def parts_of(config: RunConfig, counts: Counts, backend: str, held: Held) -> dict[str, Parts]:
    """Return the bytes of rollout actors and learner that may leave a GPU between turns."""
    # layers keep the packed input of their last product, so it stays on the GPU
    packed_bytes = {"rollout": round(counts.step.widest * _per_element(backend)), "learner": 0}
    parts: dict[str, Parts] = {}
    for service in packed_bytes.keys() & held.keys():
        by_purpose = {what: size or 0 for what, size in held[service].items()}
        models = sum(size for what, size in by_purpose.items() if what.startswith(MODELS))
        passes = sum(size for what, size in by_purpose.items() if what.startswith("passes"))
        parts[service] = Parts(models, max(0, passes - packed_bytes[service]))
    return parts


MODELS = ("denoiser", "autoencoder", "tiny autoencoder")
"""Prefixes of the entries for models that may leave a GPU."""


def _per_element(backend: str) -> float:
    """Return the bytes of one activation element packed by kernels; 0 if nothing is quantized.

    It has the format of the weights, scales included. Packing by torch operations needs several
    times as much; ``auto`` does not do that.
    """
    spec = BACKENDS[backend]
    return spec.bits / 8 if spec.quantizes else 0.0


def actor_memory(
    config: RunConfig, counts: Counts, family: Family, backend: str, dtype: torch.dtype
) -> Held:
    """Return the bytes of an actor by service and purpose; None marks an unknown size.

    The learner is the replica with the most prompts.
    """
    held: Held = {}
    if config.plan.explore:
        held["rollout"] = _rollout(config, counts, backend)
    held["learner"] = _learner(config, counts, family, backend, dtype)
    for kind in kinds_of(config):
        if labels := config.scorers_of(kind):
            chosen = [scorer for scorer in config.rewards.all_scorers if scorer.label in labels]
            held[kind] = {f"scorer {scorer.label}": _scorer(scorer) for scorer in chosen}
    held["encoder"] = {"text encoders": counts.text}
    if family.edits:
        size = counts.autoencoder * dtype.itemsize // 4  # its count is in FP32
        held["encoder"][f"autoencoder, {config.regenerate.precision}"] = size
        held["encoder"]["passes, one image to edit"] = counts.source_peak
    return held


def _scorer(scorer: Scorer) -> int | None:
    """Return the bytes of a scorer's model, or None if unknown; cached in this process."""
    key = scorer.model_dump_json()
    size = _built.get(key)
    if size is None and (size := model_bytes(scorer)) is not None:
        _built[key] = size
    return size


_built: dict[str, int] = {}


def _rollout(config: RunConfig, counts: Counts, backend: str) -> dict[str, int | None]:
    """Return the bytes of a rollout actor, by purpose."""
    unquantized = backend == config.regenerate.precision
    gpus = on_gpus(config, config.services.rollout)
    precision = "bf16" if proxy_dtype(config, gpus) == torch.bfloat16 else "fp32"
    tiny = "tiny " if config.explore.decoder == "tiny" else ""
    # GPUs hold the packed input of one layer at a time; the emulation on a CPU packs nothing
    packed = counts.step.widest * _per_element(backend) if gpus else 0.0
    return {
        f"denoiser, {backend}": counts.denoiser if unquantized else counts.rollout,
        f"{tiny}autoencoder, {precision}": counts.proxy_decoder,
        f"passes, {batch_of(config)} images": max(
            counts.step.peak + round(packed), counts.proxy_peak
        ),
    }


def _learner(
    config: RunConfig, counts: Counts, family: Family, backend: str, dtype: torch.dtype
) -> dict[str, int | None]:
    """Return the bytes of the learner replica with the most prompts, by purpose."""
    objective = build_objective(config.objective, config.stop.max_kl is not None)
    adapters = adapters_of(config, objective)
    images, points = config.regenerate.batch_size, config.optimizer.batch_size
    per_prompt = sizes.conditioning_bytes(family, dtype, bool(config.guidance.stages))
    replicas = config.services.learner.replicas
    prompts = _prompts(config)
    base, merged_base = config.lora.base, config.lora.base == "full"
    saved, widest = _packed(config, family, dtype)
    weights = "merged weights" if merged_base else "adapters"
    denoiser, gathered, parts = _sharded(config, counts, family, dtype)
    merged = math.ceil(counts.targets / parts)
    held: dict[str, int | None] = {
        f"{denoiser}, {config.regenerate.precision if merged_base else base}": (
            math.ceil((counts.denoiser - saved) / parts)
        ),
        **gathered,
        "autoencoder, fp32": counts.autoencoder,
        f"{len(adapters)} adapters, fp32": len(adapters) * counts.trained * 4,
        "optimizer, fp32": 2 * counts.trained * 4,
        "conditioning": prompts * per_prompt,
        f"passes, {images} images on {weights} or {points} points": max(
            merged + counts.merged.peak if merged_base else counts.adapted.peak + widest,
            counts.decode_again,
            counts.training.peak + widest,
            _checking(config, counts, BACKENDS[backend].dtype not in (None, dtype)),
        ),
    }
    if config.plan.explore and not on_gpus(config, config.services.learner):
        # always in host memory, so it counts only for a learner that computes on CPUs
        held["last version, its adapter"] = counts.broadcast + 4 * counts.trained
    if replicas > 1:
        held["sum of gradients, fp32"] = counts.trained * 4
    return held


def _prompts(config: RunConfig) -> int:
    """Return the number of prompts of which the busiest replica holds samples."""
    per_replica, remainder = divmod(config.prompts.per_iteration, config.services.learner.replicas)
    if config.services.learner.share == "samples":
        # a run of samples has partial prompts at both ends
        return min(config.prompts.per_iteration, per_replica + 1 + bool(remainder))
    return per_replica + bool(remainder)


def _packed(config: RunConfig, family: Family, dtype: torch.dtype) -> tuple[int, int]:
    """Return (bytes saved by packing the base, bytes of its largest weight unpacked), or zeros."""
    base, patterns = config.lora.base, config.explore.modules_to_not_convert
    return (0, 0) if base == "full" else sizes.packed_base(family, base, patterns, dtype)


def _sharded(
    config: RunConfig, counts: Counts, family: Family, dtype: torch.dtype
) -> tuple[str, dict[str, int | None], int]:
    """Return (label of a replica's part of the denoiser, bytes it gathers, number of parts)."""
    learner = config.services.learner
    if learner.shard == "none" or learner.replicas == 1:
        return "denoiser", {}, 1
    shards = sizes.shards_of(family, dtype)
    # the block that computes and the next one being gathered, each also as received, before it is
    # copied into its layout
    gathered = shards.always + 4 * shards.largest
    return (
        f"1/{learner.replicas} of the denoiser",
        {"gathered weights, two blocks twice": min(gathered, 2 * counts.denoiser)},
        learner.replicas,
    )


def _checking(config: RunConfig, counts: Counts, converted: bool) -> int:
    """Return the extra bytes of the identity check: published weights, and a pass of one image.

    ``converted``: rollout actors load the weights in another dtype than the learner.
    """
    if not config.plan.explore or not config.audit.identity_every:
        return 0
    # unpublished weights are the learner's own, or are loaded again if those cannot be used
    again = converted or config.services.learner.shard == "base"
    one_image = counts.step.peak // batch_of(config)
    return (counts.rollout if again else counts.broadcast) + one_image
