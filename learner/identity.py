"""The learner's part of the policy identity check: latents from the weights that it published.

A rollout actor acknowledges the checksum of the bytes that it received, which does not prove that
its denoiser computes with them. Therefore its latents of a few seeds are compared with those that
the learner computes from the same bytes; they must be bit-identical if device and kernels are.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from configs.schema import RunConfig
from learner.distance import relative_distance
from policy.device import tf32, threads
from policy.explorer import PackedPolicy
from policy.families import Family, family_for
from policy.lora import adapted_modules
from policy.precision.backends import BACKENDS, Backend
from policy.precision.compiling import computing
from policy.precision.manifest import Manifest
from policy.sampling.guidance import Guided
from policy.sharding import sharded
from policy.types import DTYPES, Conditioning

SAFETY = 8.0
"""Safety factor on the expected distance, as one image in few steps samples few roundings."""


@dataclass(frozen=True)
class ProbeInputs:
    """What to generate: one row of conditioning, B seeds."""

    cond: Conditioning
    seeds: Sequence[int]
    steps: int
    solver: str
    guided: Guided | None = None


def recompute(
    config: RunConfig,
    family: Family,
    transformer: nn.Module,
    backend: Backend,
    device: torch.device,
    manifest: Manifest,
    shards: Sequence[np.ndarray],
    requested: ProbeInputs,
) -> tuple[np.ndarray, str, float]:
    """Generate from packed weights; return (latents [B, *latent], kind of arithmetic, bound).

    ``transformer`` is the learner's own, with adapters, and is not changed. While this runs, the
    packed weights are on ``device`` beside it. ``bound`` limits the relative distance of latents
    computed by other kernels, whose rounding differs: S steps through L layers round S L times
    independently (twice as often with guidance), and each rounding is assumed to have at most the
    effect of changing the conditioning by the machine epsilon, which is measured here, or of
    rounding the latents themselves: quantized activations may not change with the conditioning. The
    result is multiplied by ``SAFETY``.
    """
    runs = backend if backend.unavailable_reason(device) is None else _emulation(backend, device)
    loaded = DTYPES[config.regenerate.precision]
    width = runs.dtype or loaded
    # loaded again as rollout actors do: the learner has a shard only, or weights of another dtype,
    # which a family may keep in float32 for some modules
    again = width != loaded or any(
        sharded(parameter) is not None for parameter in transformer.parameters()
    )
    own = family.load_transformer("cpu", width) if again else bare_copy(transformer)
    unpacked = {entry.name.removesuffix(".weight") for entry in manifest.entries}
    _own_weights(own, unpacked)
    service = config.services.rollout
    with torch.no_grad(), threads(service.threads), tf32(device, service.tf32):
        smaller = config.explored_model != config.model
        policy = PackedPolicy(
            family_for(config.explored_model) if smaller else family,
            runs,
            own,
            config.explore.modules_to_not_convert,
            device,
            config.explore.activation_amax,
            trained=config.lora.targets or family.lora_targets,
            full=family if smaller else None,
        )
        policy.load(manifest, shards)
        how = (requested.seeds, requested.steps, requested.solver, requested.guided)
        latents = policy.latents(requested.cond, *how)
        moved = policy.latents(_nudged(requested.cond, torch.finfo(width).eps), *how)
    roundings = requested.steps * len(policy.plan) * (2 if requested.guided else 1)
    each = max(relative_distance(moved.numpy(), latents.numpy()), torch.finfo(latents.dtype).eps)
    bound = SAFETY * math.sqrt(roundings) * each
    return latents.numpy(), computing(device, runs.name), bound


def bare_copy(transformer: nn.Module) -> nn.Module:
    """Return a copy of ``transformer`` without adapters, which shares its memory."""
    shared: dict[int, Tensor] = {id(buffer): buffer for buffer in transformer.buffers()}
    shared |= {id(parameter): parameter for parameter in transformer.parameters()}
    twin = copy.deepcopy(transformer, {**shared})
    for name, layer in adapted_modules(twin):
        bare = layer.get_base_layer()
        assert isinstance(bare, nn.Module)
        twin.set_submodule(name, bare)
    return twin


def _own_weights(transformer: nn.Module, names: set[str]) -> None:
    """Allocate new weights for the named modules, which share the learner's memory so far."""
    for name, module in transformer.named_modules():
        weight = getattr(module, "weight", None)
        if name in names and isinstance(weight, nn.Parameter):
            module.weight = nn.Parameter(torch.empty_like(weight), requires_grad=False)


def _emulation(backend: Backend, device: torch.device) -> Backend:
    """Return a backend of the same format that runs on ``device``. Raises ValueError if none."""
    for other in BACKENDS.values():
        if other.wire_format == backend.wire_format and other.unavailable_reason(device) is None:
            return other
    raise ValueError(
        f"audit.identity_every: the learner's device ({device.type}) cannot compute in"
        f" {backend.wire_format}: set it to 0"
    )


def _nudged(cond: Conditioning, eps: float) -> Conditioning:
    """Return the conditioning with every number multiplied by 1 + eps or 1 - eps at random."""
    generator = torch.Generator().manual_seed(0)

    def moved(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        sign = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
        return tensor * (1 + eps * sign).to(tensor.device, tensor.dtype)

    return cond.map(moved)
