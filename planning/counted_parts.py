"""The parts of ``Counts``, each counted by building models on the meta device and running them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from configs.schema import RunConfig
from configs.services import Service
from planning import passes, sizes
from policy import meta, pass_cost
from policy.decoders import keeps_frames, meta_decoder, proxy_dtype
from policy.families import Family
from policy.lora import target_modules
from policy.pass_cost import PassCost
from policy.precision.backends import Backend
from policy.types import DTYPES

FOR_IMAGES = re.compile(r"\b(visual|vision_tower|multi_modal_projector)\b")
"""Parts of text encoders that process images; the text of a prompt does not pass through them."""


def batch_of(config: RunConfig) -> int:
    """Return the number of images in a call of a rollout actor's denoiser."""
    return min(config.explore.chunk_size, config.explore.pool_size)


def on_gpus(config: RunConfig, service: Service) -> bool:
    """Return True if the service's actors use GPUs, or will once a layout assigns their shares."""
    return bool(service.gpus) or config.layout is not None


def explored(config: RunConfig, family: Family, backend: Backend) -> dict[str, Any]:
    """Count what a rollout actor holds, receives and does for a chunk."""
    dtype, batch = DTYPES[config.regenerate.precision], batch_of(config)
    base = meta.meta_denoiser(family, dtype)
    adapted = target_modules(base, config.lora.targets or family.lora_targets)
    transformer, rows, layers = meta.meta_explorer(
        family, backend, config.explore.modules_to_not_convert, dtype
    )
    wire = sizes.wire_bytes(rows, layers, adapted, backend)
    explored_model = config.explored_model.model_copy(update={"path": family.model.path})
    explored_family = type(family)(explored_model)
    scale = config.plan.explore.guidance if config.plan.explore else 1.0
    groups = pass_cost.groups_of(rows)
    gpu = on_gpus(config, config.services.rollout)
    decoder = meta_decoder(config, family, proxy_dtype(config, gpu))
    proxy_decoder, proxy = passes.decoding_work(family, batch, decoder, gpu)
    return {
        "quantized": sum(math.prod(row.shape) for row in rows if row.quantized),
        "rollout": pass_cost.held_bytes(transformer),
        "broadcast": wire.total,
        "changing": wire.changing,
        "step": _sampling(explored_family, base, batch, _rows(config, batch, scale), dtype, groups),
        "proxy_decoder": proxy_decoder,
        "proxy_flops": round(proxy.flops / batch),
        "proxy_peak": proxy.peak,
    }


def regenerated(config: RunConfig, family: Family, _: Backend) -> dict[str, Any]:
    """Count the unquantized model's parts, and regenerating and encoding with them."""
    dtype, batch = DTYPES[config.regenerate.precision], config.regenerate.batch_size
    encoders = meta.text_encoders(family, dtype)
    base = meta.meta_denoiser(family, dtype)
    weights, denoiser = sum(p.numel() for p in base.parameters()), pass_cost.held_bytes(base)
    rows = _rows(config, batch, config.guidance.regenerate, config.guidance.evaluate)
    merged = _sampling(family, base, batch, rows, dtype)
    trained = meta.adapt(base, family, config.lora)
    services = config.services
    vae, gpu = meta.meta_component(family, "vae", torch.float32), on_gpus(config, services.learner)
    autoencoder, decode = passes.decoding_work(family, batch, vae, gpu)
    encodes = on_gpus(config, services.encoder)
    source = passes.source_work(family, dtype, encodes) if family.edits else PassCost()
    return {
        "weights": weights,
        "trained": trained,
        "denoiser": denoiser,
        "targets": sizes.adapted_bytes(base),
        "autoencoder": autoencoder,
        "text": pass_cost.held_bytes(*encoders.values()),
        "text_flops": _text_flops(encoders, family),
        "merged": merged,
        "adapted": _sampling(family, base, batch, rows, dtype),
        "decode_flops": round(decode.flops / batch),
        "decode_again": decode.peak,
        "decode_eager": keeps_frames(vae),
        "source_flops": round(source.flops),
        "source_peak": source.peak,
    }


def trained(config: RunConfig, family: Family, _: Backend) -> dict[str, Any]:
    """Count a forward and backward pass; its peak includes the rows of guidance."""
    dtype, recomputed = DTYPES[config.regenerate.precision], config.optimizer.recomputed
    adapted = meta.meta_denoiser(family, dtype)
    meta.adapt(adapted, family, config.lora)
    points = config.optimizer.batch_size
    # the first pass makes tables of positions that some models keep
    pass_cost.denoiser_cost(family, adapted, points, dtype)
    work = passes.training_work(family, adapted, points, dtype, recomputed)
    rows = _rows(config, points, config.guidance.train)
    if rows != points:
        peak = passes.training_work(family, adapted, rows, dtype, recomputed).peak
        work = replace(work, peak=peak)
    return {"training": work}


def _rows(config: RunConfig, batch: int, *scales: float) -> int:
    """Return the rows of a pass for ``batch`` images: doubled if any of ``scales`` guides."""
    doubled = config.guidance.one_pass and any(scale != 1 for scale in scales)
    return 2 * batch if doubled else batch


def _sampling(
    family: Family,
    transformer: nn.Module,
    batch: int,
    rows: int,
    dtype: torch.dtype,
    groups: Mapping[str, str] | None = None,
) -> PassCost:
    """Return the operations for ``batch`` images; peak and widest are of a pass of ``rows``."""
    work = pass_cost.denoiser_cost(family, transformer, batch, dtype, groups)
    if rows == batch:
        return work
    all_rows = pass_cost.denoiser_cost(family, transformer, rows, dtype, groups)
    return replace(work, peak=all_rows.peak, widest=all_rows.widest)


def _text_flops(encoders: dict[str, nn.Module], family: Family) -> int:
    """Return the operations of all linear layers for one prompt.

    Layers for images process the patches of its source image, all others its tokens.
    """
    flops = 0
    for encoder in encoders.values():
        for name, module in encoder.named_modules():
            if isinstance(module, nn.Linear):
                for_image = FOR_IMAGES.search(name)
                rows = family.source_patches if for_image else family.text_tokens
                flops += 2 * rows * module.weight.numel()
    return flops
