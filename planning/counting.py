"""Count the bytes of a model's parts and the operations of its single passes, as a run uses them.

Counting takes a minute for a large model, so the counts of the shipped presets are stored in
``layouts/counted.json``, written by ``python -m tools.count_models``; others are counted on demand.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from configs.schema import RunConfig
from planning.counted_parts import batch_of, explored, on_gpus, regenerated, trained
from policy.decoders import proxy_dtype
from policy.families import Family
from policy.families.files import is_local
from policy.pass_cost import PassCost
from policy.precision.backends import Backend

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


def counts_of(config: RunConfig, family: Family, backend: Backend) -> Counts:
    """Return the counts of a configuration; what no stored row has is counted now.

    A row of other settings is used for the parts that do not depend on them: another chunk size
    changes neither a training pass nor regenerating. A local copy of a published model has the
    model's rows.
    """
    fields = _fields(config, backend.name)
    if is_local(config.model):
        fields[0] = family.published or f"local:{config.model.path}"
    if (row := kept_rows().get(" ".join(fields))) is not None:
        return row
    counted: dict[str, Any] = {}
    for part in PARTS:
        row = _rows_by_part(part).get(_part_key(part, fields))
        if row is None:
            counted |= _count_part(part, config, family, backend)
        else:
            counted |= {name: getattr(row, name) for name in PARTS[part].counts}
    return Counts(**counted)


def key_of(config: RunConfig, backend: str) -> str:
    """Return a key of all settings that the counts of a published architecture depend on."""
    return " ".join(_fields(config, backend))


def _fields(config: RunConfig, backend: str) -> list[str]:
    """Return the fields of ``key_of``; those that ``Part.without`` names have a fixed position."""
    model, lora, explore = config.model, config.lora, config.explore
    parts = [
        *(model.path, model.height, model.width, model.max_sequence_length),
        *(int(model.vae_slicing), int(model.vae_tiling), int(model.complex_human_instruction)),
        *(backend, batch_of(config), "+".join(explore.modules_to_not_convert)),
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
    dtype = proxy_dtype(config, on_gpus(config, config.services.rollout))
    parts += [explore.decoder, explore.decoder_path or "", str(dtype).removeprefix("torch.")]
    return [str(part) for part in parts]


def _part_key(part: str, fields: Sequence[str]) -> tuple[str, ...]:
    """Return the fields that a part depends on."""
    without = {position % len(fields) for position in PARTS[part].without}
    return tuple(field for position, field in enumerate(fields) if position not in without)


@functools.cache
def _rows_by_part(part: str) -> dict[tuple[str, ...], Counts]:
    # hub ids and names of modules have no spaces
    return {_part_key(part, key.split(" ")): row for key, row in kept_rows().items()}


_counted: dict[tuple[str, ...], dict[str, Any]] = {}


def _count_part(part: str, config: RunConfig, family: Family, backend: Backend) -> dict[str, Any]:
    """Count a part, or return what was counted in this process."""
    key = (part, f"{config.lora.alpha}", *_part_key(part, _fields(config, backend.name)))
    if key not in _counted:
        _counted[key] = PARTS[part].count(config, family, backend)
    return _counted[key]


def count(config: RunConfig, family: Family, backend: Backend) -> Counts:
    """Count by building and running the models on the meta device, without reading weights."""
    counted: dict[str, Any] = {}
    for part in PARTS:
        counted |= _count_part(part, config, family, backend)
    return Counts(**counted)


@functools.cache
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


class Part(NamedTuple):
    """Part of ``Counts``: the function that counts it, and positions in ``_fields`` without effect.

    ``counts`` are the fields that it fills.
    """

    count: Callable[[RunConfig, Family, Backend], dict[str, Any]]
    without: tuple[int, ...]
    counts: tuple[str, ...]


BACKEND, CHUNK, NOT_CONVERTED, REGENERATED, POINTS, RECOMPUTED = 7, 8, 9, 11, 12, 13
PROXIES = -3, -2, -1
"""Positions in ``_fields``."""
PARTS = {
    "explored": Part(
        explored,
        (REGENERATED, POINTS, RECOMPUTED),
        ("quantized", "rollout", "broadcast", "changing", "step")
        + ("proxy_decoder", "proxy_flops", "proxy_peak"),
    ),
    "regenerated": Part(
        regenerated,
        (BACKEND, CHUNK, NOT_CONVERTED, POINTS, RECOMPUTED, *PROXIES),
        ("weights", "trained", "denoiser", "targets", "autoencoder", "text", "text_flops")
        + ("merged", "adapted", "decode_flops", "decode_again", "decode_eager")
        + ("source_flops", "source_peak"),
    ),
    "trained": Part(trained, (BACKEND, CHUNK, NOT_CONVERTED, REGENERATED, *PROXIES), ("training",)),
}
