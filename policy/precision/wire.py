"""Published weights: named tensors as shards of bytes, packed and unpacked by their manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash
from torch import Tensor

from policy.precision.backends import wire_formats
from policy.precision.manifest import (
    FLOATS,
    WIRE_DTYPES,
    WIRE_NAMES,
    Entry,
    Manifest,
    WireError,
    pieces,
)


@dataclass(frozen=True)
class Section:
    """Tensors one after the other, in shards of their own: a part of a version."""

    entries: tuple[Entry, ...]  # offsets count from the section's begin
    shards: tuple[np.ndarray, ...]  # uint8
    hashes: tuple[str, ...]


def pack_section(named: dict[str, Tensor], shard_bytes: int) -> Section:
    """Concatenate tensors, in the order of ``named``, into uint8 shards of ``shard_bytes``.

    There are no gaps, and the last shard is shorter. Raises ValueError for what cannot travel.
    """
    if shard_bytes < 1:
        raise ValueError(f"shards of {shard_bytes} bytes: at least 1 is needed")
    entries, offset = [], 0
    for name, tensor in named.items():
        if tensor.dtype not in WIRE_NAMES:
            raise ValueError(
                f"{name} is {tensor.dtype}; what travels is one of {', '.join(WIRE_DTYPES)}"
            )
        shape, dtype = tuple(tensor.shape), WIRE_NAMES[tensor.dtype]
        entries.append(Entry(name, dtype, shape, offset, tensor.nbytes))
        offset += tensor.nbytes
    starts = range(0, offset, shard_bytes)
    sizes = [min(shard_bytes, offset - start) for start in starts]
    shards = tuple(np.empty(size, np.uint8) for size in sizes)
    for entry, tensor in zip(entries, named.values(), strict=True):
        source = _bytes(tensor.detach().cpu().contiguous()).numpy()
        for shard, inside, piece in pieces(entry, starts, sizes):
            shards[shard][inside] = source[piece]
    # of each shard, not of the whole: one that is as it was need not be fetched or sent again
    hashes = tuple(xxhash.xxh3_64_hexdigest(shard.data) for shard in shards)
    return Section(tuple(entries), shards, hashes)


def assemble(
    sections: Sequence[Section], version: int, format: str
) -> tuple[Manifest, list[np.ndarray]]:
    """One version of several sections, and its shards. ``format``: the wire format of a backend."""
    versions = wire_formats()
    if format not in versions:
        raise ValueError(f"wire format {format!r} is unknown: use one of {', '.join(versions)}")
    shards = [shard for section in sections for shard in section.shards]
    hashes = tuple(found for section in sections for found in section.hashes)
    entries: list[Entry] = []
    begin = 0
    for section in sections:
        entries += [replace(entry, offset=begin + entry.offset) for entry in section.entries]
        begin += sum(shard.nbytes for shard in section.shards)
    sizes = tuple(shard.nbytes for shard in shards)
    return Manifest(version, format, versions[format], sizes, hashes, tuple(entries)), shards


def unpack_into(
    manifest: Manifest,
    shards: Sequence[np.ndarray | None],
    targets: dict[str, Tensor],
    before: Manifest | None = None,
) -> None:
    """Verify everything, then copy each entry into its target in place.

    In place, because captured graphs and compiled code keep the pointers of the targets.
    A float target may differ from its entry in float width; everything else must agree. None
    stands for a shard that ``targets`` hold already, from the version ``before``. Raises WireError,
    naming what differs, before any target has changed.
    """
    here = wire_formats().get(manifest.format, "unknown")
    if manifest.format_version != here:
        raise WireError(
            f"version {manifest.version} is {manifest.format} in version {manifest.format_version},"
            f" here it is {here}: learner and rollout actors must run the same Sol-RL"
        )
    # all checks before the first copy: half a version would be a policy that nobody published
    _check_shards(manifest, shards, before)
    _check_targets(manifest, targets)
    with torch.no_grad():
        for entry in manifest.entries:
            parts = list(manifest.pieces(entry))
            arrived = [
                (shard, inside, piece)
                for index, inside, piece in parts
                if (shard := shards[index]) is not None
            ]
            if len(arrived) == len(parts):  # else none of its bytes has changed
                _copy(WIRE_DTYPES[entry.dtype], targets[entry.name], arrived)


def _copy(
    dtype: torch.dtype, target: Tensor, pieces: Sequence[tuple[np.ndarray, slice, slice]]
) -> None:
    """Bytes of ``dtype`` into their places in ``target``."""
    in_place = target.dtype == dtype and target.device.type == "cpu"
    # whole on the host first: bytes cannot be written into a device or another float width
    staged = target if in_place else torch.empty(target.shape, dtype=dtype)
    buffer = _bytes(staged).numpy()
    for shard, inside, piece in pieces:
        buffer[piece] = shard[inside]
    if not in_place:
        target.copy_(staged)


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: uint8 [nbytes], shared."""
    return (
        tensor.detach().view(-1).view(torch.uint8)
        if tensor.numel()
        else torch.empty(0, dtype=torch.uint8)
    )


def _check_shards(
    manifest: Manifest, shards: Sequence[np.ndarray | None], before: Manifest | None
) -> None:
    label = f"version {manifest.version}"
    if len(shards) != len(manifest.shard_sizes) or len(manifest.hashes) != len(
        manifest.shard_sizes
    ):
        raise WireError(
            f"{label}: {len(shards)} shards arrived, the manifest lists {len(manifest.shard_sizes)}"
        )
    if any(size < 1 for size in manifest.shard_sizes):
        raise WireError(f"{label}: the manifest has a shard of {min(manifest.shard_sizes)} bytes")
    needed = set(manifest.changed_since(before))
    for index, (shard, size, wanted) in enumerate(
        zip(shards, manifest.shard_sizes, manifest.hashes, strict=True)
    ):
        if shard is None:
            if index in needed:
                held = "nothing" if before is None else f"version {before.version}"
                raise WireError(
                    f"{label}: shard {index} was not sent, and {held} is held here, where it is"
                    " another: publish all of it"
                )
            continue
        if shard.dtype != np.uint8 or shard.shape != (size,):
            raise WireError(
                f"{label}: shard {index} is {shard.dtype} {list(shard.shape)}, the manifest says"
                f" {size} bytes"
            )
        found = xxhash.xxh3_64_hexdigest(shard.data)
        if found != wanted:
            raise WireError(
                f"{label}: shard {index} is damaged, its xxh3 is {found}, the manifest says"
                f" {wanted}: publish again"
            )


def _check_targets(manifest: Manifest, targets: dict[str, Tensor]) -> None:
    label, total = f"version {manifest.version}", sum(manifest.shard_sizes)
    names = [entry.name for entry in manifest.entries]
    missing, unknown = sorted(targets.keys() - set(names)), sorted(set(names) - targets.keys())
    if missing or unknown or len(set(names)) != len(names):
        what = (
            f"lacks {missing[0]!r}"
            if missing
            else f"has {unknown[0]!r}, unknown here"
            if unknown
            else "has a name twice"
        )
        raise WireError(
            f"{label} {what}: learner and explorer must have the same model and"
            " explore.modules_to_not_convert"
        )
    for entry in manifest.entries:
        target, dtype = targets[entry.name], WIRE_DTYPES.get(entry.dtype)
        if dtype is None or (dtype != target.dtype and not {dtype, target.dtype} <= set(FLOATS)):
            raise WireError(f"{label}: {entry.name} is {entry.dtype}, here it is {target.dtype}")
        if entry.shape != tuple(target.shape):
            raise WireError(
                f"{label}: {entry.name} is {list(entry.shape)}, here it is {list(target.shape)}"
            )
        nbytes = target.numel() * dtype.itemsize
        if entry.nbytes != nbytes or not 0 <= entry.offset <= total - nbytes:
            raise WireError(
                f"{label}: {entry.name} lies at {entry.offset} + {entry.nbytes} of {total} bytes,"
                f" it has {nbytes}"
            )
        if not target.is_contiguous():
            raise WireError(f"{entry.name} is not contiguous here, so it cannot be copied into")
