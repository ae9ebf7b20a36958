"""Count the bytes of a model's parts and the operations of its single passes, as a run uses them.

Counting takes a minute for a large model, so the counts of the shipped presets are stored in
``layouts/counted.json``, written by ``python -m tools.count_models``; others are counted on demand.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn

from configs.paths import exists
from configs.schema import RunConfig
from configs.services import Service
from planning import passes, sizes
from policy import meta, pass_cost
from policy.decoders import keeps_frames, meta_decoder, proxy_dtype
from policy.families import Family
from policy.families.architectures import published, published_names
from policy.lora import target_modules
from policy.pass_cost import PassCost
from policy.precision.backends import Backend
from policy.types import DTYPES

FOR_IMAGES = re.compile(r"\b(visual|vision_tower|multi_modal_projector)\b")
"""Parts of text encoders that process images; the text of a prompt does not pass through them."""
KEPT = Path(__file__).parent / "layouts" / "counted.json"


@dataclass(frozen=True)
class Counts:
    """Bytes of a model's parts, and the work of its passes.

    ``step`` is a rollout actor's denoiser call for a chunk, ``merged`` a learner's to regenerate,
    ``adapted`` the same with an unmerged adapter, ``training`` one forward and backward pass.
    """

    weights: int  # number of weights of the denoiser; so are the next two
    quantized: int
    trained: int
    denoiser: int  # bytes
    targets: int  # bytes of the weights that have adapters
    rollout: int  # bytes, in the backend's format
    autoencoder: int
    text: int
    text_flops: int  # to encode one prompt: products with weights
    broadcast: int  # bytes of a version
    changing: int  # bytes of it that an update changes
    step: PassCost
    merged: PassCost
    adapted: PassCost
    training: PassCost
    decode_flops: int  # of one image, by the model's own autoencoder
    decode_again: int  # peak bytes, for a learner's batch
    decode_eager: bool  # the autoencoder keeps frames between calls, so it is never compiled
    proxy_decoder: int  # bytes
    proxy_flops: int  # to decode one proxy image
    proxy_peak: int  # peak bytes for a chunk, eager; a compiled decoder needs less
    # editing models only: to encode one source image, and the peak bytes of that
    source_flops: int = 0
    source_peak: int = 0


def batch_of(config: RunConfig) -> int:
    """Return the number of images in a call of a rollout actor's denoiser."""
    return min(config.explore.chunk_size, config.explore.pool_size)


def on_gpus(config: RunConfig, service: Service) -> bool:
    """Return True if the service's actors use GPUs, or will once a layout assigns their shares."""
    return bool(service.gpus) or config.layout is not None


def counts_of(config: RunConfig, family: Family, backend: Backend) -> Counts:
    """Return the stored counts of a configuration, or count now."""
    key = key_of(config, backend.name)
    if (stored_counts := _kept().get(key)) is not None:
        return stored_counts
    if key not in _counted:
        # stored with every block recomputed: another share changes only the training pass
        every = config.optimizer.model_copy(update={"gradient_checkpointing": True})
        stored = _kept().get(key_of(config.model_copy(update={"optimizer": every}), backend.name))
        if stored is not None:
            base = meta.meta_denoiser(family, DTYPES[config.regenerate.precision])
            meta.adapt(base, family, config.lora)
            _counted[key] = replace(stored, training=_training(config, family, base))
        else:
            _counted[key] = count(config, family, backend)
    return _counted[key]


def key_of(config: RunConfig, backend: str) -> str:
    """Return a key of all settings that the counts of a published architecture depend on."""
    explore, dtype = config.explore, proxy_dtype(config, on_gpus(config, config.services.rollout))
    proxies = [explore.decoder, explore.decoder_path or "", str(dtype).removeprefix("torch.")]
    return " ".join([_shared_key(config, backend), *proxies])


def _shared_key(config: RunConfig, backend: str) -> str:
    """Return the key without the settings of the decoder for proxy images."""
    model, lora = config.model, config.lora
    parts = [
        *(model.path, model.height, model.width, model.max_sequence_length),
        *(int(model.vae_slicing), int(model.vae_tiling), int(model.complex_human_instruction)),
        *(backend, batch_of(config), "+".join(config.explore.modules_to_not_convert)),
        *(config.regenerate.precision, config.regenerate.batch_size),
        *(config.optimizer.batch_size, f"{config.optimizer.recomputed:g}"),
        *(lora.rank, "+".join(lora.targets)),
    ]
    doubled = [stage for stage in config.guidance.stages if config.guidance.one_pass]
    small = config.explored_model
    if small != model:
        parts += [small.height, small.width]
    if model.frames is not None:
        parts.append(f"{model.frames}f" if small == model else f"{model.frames}f>{small.frames}f")
    if doubled:
        parts.append("+".join(doubled))
    services = (config.services.rollout, config.services.learner, config.services.encoder)
    if not all(on_gpus(config, service) for service in services):
        parts.append("host:" + "".join(str(int(on_gpus(config, each))) for each in services))
    return " ".join(str(part) for part in parts)


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


@functools.cache
def _kept() -> dict[str, Counts]:
    models = [published(name) for name in published_names()]
    ids = {one["hub_id"] for model in models for one in (model, *model.get("variants", ()))}
    return {
        key: row
        for key, row in kept_rows().items()
        # a local directory of that name may hold another model
        if key.partition(" ")[0] in ids and not exists(Path(key.partition(" ")[0]))
    }


def kept_rows() -> dict[str, Counts]:
    """Return the counts stored in ``counted.json``, by key."""
    return TypeAdapter(dict[str, Counts]).validate_json(KEPT.read_bytes())


def write_kept(rows: dict[str, Counts]) -> None:
    """Store counts, by key, in ``counted.json``."""
    table = {key: _whole(asdict(row)) for key, row in sorted(rows.items())}
    KEPT.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def _whole(value: Any) -> Any:
    """Convert floats to int, so that an unchanged row is written exactly as it was read."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) else value


def count(config: RunConfig, family: Family, backend: Backend) -> Counts:
    """Count by building and running the models on the meta device, without reading weights."""
    gpu = on_gpus(config, config.services.rollout)
    decoder = meta_decoder(config, family, proxy_dtype(config, gpu))
    proxy_decoder, proxy = passes.decoding_work(family, batch_of(config), decoder, gpu)
    return replace(
        _of_backend(config, family, backend),
        proxy_decoder=proxy_decoder,
        proxy_flops=round(proxy.flops / batch_of(config)),
        proxy_peak=proxy.peak,
    )


_seen: dict[str, Counts] = {}
_counted: dict[str, Counts] = {}


def _of_backend(config: RunConfig, family: Family, backend: Backend) -> Counts:
    """Return the counts that do not depend on the proxy decoder; cached per process."""
    key = f"{_shared_key(config, backend.name)} {config.lora.alpha}"
    if key in _seen:
        return _seen[key]
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
    _seen[key] = replace(
        _common(config, family),
        quantized=sum(math.prod(row.shape) for row in rows if row.quantized),
        rollout=pass_cost.held_bytes(transformer),
        broadcast=wire.total,
        changing=wire.changing,
        step=_sampling(explored_family, base, batch, _rows(config, batch, scale), dtype, groups),
    )
    return _seen[key]


def _common(config: RunConfig, family: Family) -> Counts:
    """Return the counts that depend on neither backend nor proxy decoder; cached per process."""
    key = f"{_shared_key(config, '')} {config.lora.alpha}"
    if key in _seen:
        return _seen[key]
    dtype, regenerate_batch = DTYPES[config.regenerate.precision], config.regenerate.batch_size
    encoders = meta.text_encoders(family, dtype)
    base = meta.meta_denoiser(family, dtype)
    weights, denoiser = sum(p.numel() for p in base.parameters()), pass_cost.held_bytes(base)
    scales = config.guidance
    rows = _rows(config, regenerate_batch, scales.regenerate, scales.evaluate)
    merged = _sampling(family, base, regenerate_batch, rows, dtype)
    trained = meta.adapt(base, family, config.lora)
    services = config.services
    vae, gpu = meta.meta_component(family, "vae", torch.float32), on_gpus(config, services.learner)
    autoencoder, decode = passes.decoding_work(family, regenerate_batch, vae, gpu)
    adapted = _sampling(family, base, regenerate_batch, rows, dtype)
    encodes = on_gpus(config, services.encoder)
    source = passes.source_work(family, dtype, encodes) if family.edits else PassCost()
    _seen[key] = Counts(
        weights=weights,
        quantized=0,
        trained=trained,
        denoiser=denoiser,
        targets=sizes.adapted_bytes(base),
        rollout=denoiser,
        autoencoder=autoencoder,
        text=pass_cost.held_bytes(*encoders.values()),
        text_flops=_text_flops(encoders, family),
        broadcast=0,
        changing=0,
        step=merged,
        merged=merged,
        adapted=adapted,
        training=_training(config, family, base),
        decode_flops=round(decode.flops / regenerate_batch),
        decode_again=decode.peak,
        decode_eager=keeps_frames(vae),
        proxy_decoder=autoencoder,
        proxy_flops=round(decode.flops / regenerate_batch),
        proxy_peak=decode.peak,
        source_flops=round(source.flops),
        source_peak=source.peak,
    )
    return _seen[key]


def _training(config: RunConfig, family: Family, adapted: nn.Module) -> PassCost:
    """Return the work of a forward and backward pass; its peak includes the rows of guidance."""
    dtype, recomputed = DTYPES[config.regenerate.precision], config.optimizer.recomputed
    points = config.optimizer.batch_size
    work = passes.training_work(family, adapted, points, dtype, recomputed)
    rows = _rows(config, points, config.guidance.train)
    if rows == points:
        return work
    return replace(work, peak=passes.training_work(family, adapted, rows, dtype, recomputed).peak)


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
