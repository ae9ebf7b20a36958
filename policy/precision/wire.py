"""Published weights: named tensors as chunks of bytes with a manifest, verified before they are
copied in place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

DTYPES = {
    "uint8": torch.uint8,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
FORMATS = {"nvfp4": 1, "fp8": 1, "bf16": 1, "fp32": 1}
"""Wire formats and the version of each: raise it when what its buffers mean changes. See
``docs/precision.md``.
"""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
CASTABLE = {torch.float32, torch.bfloat16, torch.float16}


class WireError(RuntimeError):
    """Published bytes that are not what their manifest says, or not what is wanted here."""


@dataclass(frozen=True)
class Entry:
    """One tensor: ``nbytes`` bytes from ``offset`` of the concatenated chunks, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    """What the chunks of one version hold: ``format`` and its ``format_version`` say what the
    buffers mean. ``hashes`` are the chunks' xxh3-64, in hex.
    """

    version: int
    format: str
    format_version: int
    chunk_sizes: tuple[int, ...]
    hashes: tuple[str, ...]
    entries: tuple[Entry, ...]

    @cached_property
    def checksum(self) -> str:
        """xxh3-128 of everything above, hex: equal checksums mean equal weights of equal version."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.to_dict(), sort_keys=True).encode())

    @property
    def nbytes(self) -> int:
        """Size of all chunks."""
        return sum(self.chunk_sizes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Manifest:
        """The inverse of ``to_dict``. Raises WireError for anything else."""
        try:
            entries = tuple(
                Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in plain["entries"]
            )
            return cls(
                plain["version"],
                plain["format"],
                plain["format_version"],
                tuple(plain["chunk_sizes"]),
                tuple(plain["hashes"]),
                entries,
            )
        except (KeyError, TypeError) as error:
            raise WireError(f"this is no manifest of published weights: {error!r}") from error


def pack_tensors(
    named: dict[str, Tensor], version: int, format: str, chunk_bytes: int
) -> tuple[Manifest, list[np.ndarray]]:
    """Concatenate tensors into uint8 chunks of ``chunk_bytes`` (the last one shorter), in the order
    of ``named``, without gaps.

    ``format`` is one of ``FORMATS``. Raises ValueError for what cannot travel.
    """
    if format not in FORMATS:
        raise ValueError(f"wire format {format!r} is unknown: use one of {', '.join(FORMATS)}")
    if chunk_bytes < 1:
        raise ValueError(f"chunks of {chunk_bytes} bytes: at least 1 is needed")
    entries, offset = [], 0
    for name, tensor in named.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"{name} is {tensor.dtype}; what travels is one of {', '.join(DTYPES)}"
            )
        nbytes = tensor.numel() * tensor.element_size()
        entries.append(Entry(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), offset, nbytes))
        offset += nbytes
    sizes = tuple(min(chunk_bytes, offset - start) for start in range(0, offset, chunk_bytes))
    chunks = [np.empty(size, np.uint8) for size in sizes]
    for entry, tensor in zip(entries, named.values(), strict=True):
        source = _bytes(tensor.detach().cpu().contiguous()).numpy()
        for chunk, inside, piece in _pieces(entry, chunk_bytes):
            chunks[chunk][inside] = source[piece]
    hashes = tuple(xxhash.xxh3_64_hexdigest(chunk.data) for chunk in chunks)
    return Manifest(version, format, FORMATS[format], sizes, hashes, tuple(entries)), chunks


def unpack_into(
    manifest: Manifest, chunks: Sequence[np.ndarray], targets: dict[str, Tensor]
) -> None:
    """Verify everything, then copy each entry into its target in place: storage and pointers stay.

    A float target may differ from its entry in float width; everything else must agree. Raises
    WireError, naming what differs, before any target has changed.
    """
    if manifest.format_version != FORMATS.get(manifest.format):
        raise WireError(
            f"version {manifest.version} is {manifest.format} in version {manifest.format_version},"
            f" here it is {FORMATS.get(manifest.format, 'unknown')}: learner and explorers must run"
            " the same Sol-RL"
        )
    _check_chunks(manifest, chunks)
    _check_targets(manifest, targets)
    size = manifest.chunk_sizes[0] if manifest.chunk_sizes else 1
    with torch.no_grad():
        for entry in manifest.entries:
            target = targets[entry.name]
            dtype = DTYPES[entry.dtype]
            staged = (
                target
                if target.dtype == dtype and target.device.type == "cpu"
                else torch.empty(entry.shape, dtype=dtype)
            )
            buffer = _bytes(staged).numpy()
            for chunk, inside, piece in _pieces(entry, size):
                buffer[piece] = chunks[chunk][inside]
            if staged is not target:
                target.copy_(staged)


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: uint8 [nbytes], shared."""
    return (
        tensor.detach().view(-1).view(torch.uint8)
        if tensor.numel()
        else torch.empty(0, dtype=torch.uint8)
    )


def _pieces(entry: Entry, size: int) -> Iterator[tuple[int, slice, slice]]:
    """(chunk, slice of the chunk, slice of the entry's bytes) of an entry laid over chunks of
    ``size`` bytes.
    """
    start, end = entry.offset, entry.offset + entry.nbytes
    while start < end:
        chunk, inside = divmod(start, size)
        length = min(size - inside, end - start)
        yield (
            chunk,
            slice(inside, inside + length),
            slice(start - entry.offset, start - entry.offset + length),
        )
        start += length


def _check_chunks(manifest: Manifest, chunks: Sequence[np.ndarray]) -> None:
    label = f"version {manifest.version}"
    if len(chunks) != len(manifest.chunk_sizes) or len(manifest.hashes) != len(
        manifest.chunk_sizes
    ):
        raise WireError(
            f"{label}: {len(chunks)} chunks arrived, the manifest lists {len(manifest.chunk_sizes)}"
        )
    if any(size != manifest.chunk_sizes[0] for size in manifest.chunk_sizes[:-1]):
        raise WireError(
            f"{label}: the manifest's chunks {manifest.chunk_sizes} are not of equal size"
        )
    for index, (chunk, size, wanted) in enumerate(
        zip(chunks, manifest.chunk_sizes, manifest.hashes, strict=True)
    ):
        if chunk.dtype != np.uint8 or chunk.shape != (size,):
            raise WireError(
                f"{label}: chunk {index} is {chunk.dtype} {list(chunk.shape)}, the manifest says"
                f" {size} bytes"
            )
        found = xxhash.xxh3_64_hexdigest(chunk.data)
        if found != wanted:
            raise WireError(
                f"{label}: chunk {index} is damaged, its xxh3 is {found}, the manifest says"
                f" {wanted}: publish again"
            )


def _check_targets(manifest: Manifest, targets: dict[str, Tensor]) -> None:
    label, total = f"version {manifest.version}", sum(manifest.chunk_sizes)
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
            f"{label} {what}: learner and explorer must have the same model and keep_wide"
        )
    for entry in manifest.entries:
        target, dtype = targets[entry.name], DTYPES.get(entry.dtype)
        if dtype is None or (dtype != target.dtype and not {dtype, target.dtype} <= CASTABLE):
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
