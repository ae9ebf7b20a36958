"""Wire format of published weights: named tensors as shards of bytes with a manifest."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

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
    """A part of a version: concatenated tensors in separate shards."""

    entries: tuple[Entry, ...]  # offsets are relative to the start of the section
    shards: tuple[np.ndarray, ...]  # uint8
    hashes: tuple[str, ...]

    def tensors(self, names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
        """Return copies of the tensors of these names on a device."""
        found = {}
        for name in names:
            entry = self._by_name[name]
            found[name] = torch.empty(entry.shape, dtype=WIRE_DTYPES[entry.dtype], device=device)
            for index, inside, piece in pieces(entry, self._starts, self._sizes):
                _bytes(found[name])[piece].copy_(torch.from_numpy(self.shards[index][inside]))
        return found

    @cached_property
    def _by_name(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def _sizes(self) -> list[int]:
        return [shard.nbytes for shard in self.shards]

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate(self._sizes, initial=0))[:-1]


class SectionWriter:
    """Writes tensors, one after the other, into uint8 shards of ``shard_bytes`` in host memory.

    There are no gaps; the last shard may be shorter. Each byte is written once: memory that is
    touched for the first time, as that of an extra copy, costs more than the transfer.
    """

    def __init__(self, shard_bytes: int) -> None:
        """Begin a section. Raises ValueError for a shard size below 1."""
        if shard_bytes < 1:
            raise ValueError(f"shards of {shard_bytes} bytes: at least 1 is needed")
        self._size, self._offset = shard_bytes, 0
        self._entries: list[Entry] = []
        self._shards: list[np.ndarray] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor on any device. Raises ValueError for an unsupported dtype."""
        if tensor.dtype not in WIRE_NAMES:
            raise ValueError(
                f"{name} is {tensor.dtype}; supported types are {', '.join(WIRE_DTYPES)}"
            )
        shape, dtype = tuple(tensor.shape), WIRE_NAMES[tensor.dtype]
        self._entries.append(Entry(name, dtype, shape, self._offset, tensor.nbytes))
        source, written = _bytes(tensor.detach().contiguous()), 0
        while written < len(source):
            inside = self._offset % self._size
            if not inside:
                self._shards.append(np.empty(self._size, np.uint8))
            count = min(self._size - inside, len(source) - written)
            target = torch.from_numpy(self._shards[-1][inside : inside + count])
            target.copy_(source[written : written + count])
            written, self._offset = written + count, self._offset + count

    def finish(self) -> Section:
        """Return the section."""
        if filled := self._offset % self._size:
            self._shards[-1] = self._shards[-1][:filled]
        # one hash per shard, so that an unchanged shard need not be fetched or sent again
        hashes = tuple(xxhash.xxh3_64_hexdigest(shard.data) for shard in self._shards)
        return Section(tuple(self._entries), tuple(self._shards), hashes)


def assemble(
    sections: Sequence[Section], version: int, format: str
) -> tuple[Manifest, list[np.ndarray]]:
    """Combine sections into one version; return its manifest and shards.

    ``format`` is the wire format of a backend. Raises ValueError if it is unknown.
    """
    versions = wire_formats()
    if format not in versions:
        raise ValueError(f"unknown wire format {format!r}: use one of {', '.join(versions)}")
    shards = [shard for section in sections for shard in section.shards]
    hashes = tuple(digest for section in sections for digest in section.hashes)
    entries: list[Entry] = []
    start = 0
    for section in sections:
        entries += [replace(entry, offset=start + entry.offset) for entry in section.entries]
        start += sum(shard.nbytes for shard in section.shards)
    sizes = tuple(shard.nbytes for shard in shards)
    return Manifest(version, format, versions[format], sizes, hashes, tuple(entries)), shards


def unpack_into(
    manifest: Manifest,
    shards: Sequence[np.ndarray | None],
    targets: dict[str, Tensor],
    before: Manifest | None = None,
) -> None:
    """Verify everything, then copy each entry into its target in place.

    The copies are in place because captured graphs and compiled code keep the pointers of the
    targets. A float target may differ from its entry in float width; everything else must match. A
    shard is None if ``targets`` already hold its content from the version ``before``. Raises
    WireError, which names the mismatch, before any target is changed.
    """
    supported = wire_formats().get(manifest.format, "unknown")
    if manifest.format_version != supported:
        raise WireError(
            f"version {manifest.version} is {manifest.format} in version"
            f" {manifest.format_version}, but {supported} is supported here: learner and rollout"
            " actors must run the same version of Sol-RL"
        )
    # all checks before the first copy: a partial load would be a policy that was never published
    _check_shards(manifest, shards, before)
    _check_targets(manifest, targets)
    with torch.no_grad():
        for entry in manifest.entries:
            parts = list(manifest.pieces(entry))
            received = [
                (shard, inside, piece)
                for index, inside, piece in parts
                if (shard := shards[index]) is not None
            ]
            if len(received) == len(parts):  # otherwise none of its bytes have changed
                _copy(WIRE_DTYPES[entry.dtype], targets[entry.name], received)


def _copy(
    dtype: torch.dtype, target: Tensor, pieces: Sequence[tuple[np.ndarray, slice, slice]]
) -> None:
    """Copy pieces of bytes of ``dtype`` into ``target``."""
    if target.dtype == dtype and target.device.type != "cpu":
        memory = _bytes(target)
        with warnings.catch_warnings():
            # that shards in the object store are read-only; here they are only read
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            for shard, inside, piece in pieces:
                memory[piece].copy_(torch.from_numpy(shard[inside]))
        return
    # staged on the host first: bytes cannot be written to another float width
    staged = target if target.dtype == dtype else torch.empty(target.shape, dtype=dtype)
    buffer = _bytes(staged).numpy()
    for shard, inside, piece in pieces:
        buffer[piece] = shard[inside]
    if staged is not target:
        target.copy_(staged)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as uint8 [nbytes], shared."""
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
            f"{label}: {len(shards)} shards arrived, but the manifest lists"
            f" {len(manifest.shard_sizes)}"
        )
    if any(size < 1 for size in manifest.shard_sizes):
        raise WireError(
            f"{label}: the manifest contains a shard of {min(manifest.shard_sizes)} bytes"
        )
    needed = set(manifest.changed_since(before))
    for index, (shard, size, expected) in enumerate(
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
                f"{label}: shard {index} is {shard.dtype} {list(shard.shape)}, but the manifest"
                f" lists {size} bytes"
            )
        actual = xxhash.xxh3_64_hexdigest(shard.data)
        if actual != expected:
            raise WireError(
                f"{label}: shard {index} is damaged, its xxh3 is {actual}, but the manifest lists"
                f" {expected}: publish again"
            )


def _check_targets(manifest: Manifest, targets: dict[str, Tensor]) -> None:
    label, total = f"version {manifest.version}", sum(manifest.shard_sizes)
    names = [entry.name for entry in manifest.entries]
    missing, unknown = sorted(targets.keys() - set(names)), sorted(set(names) - targets.keys())
    if missing or unknown or len(set(names)) != len(names):
        what = (
            f"lacks {missing[0]!r}"
            if missing
            else f"has {unknown[0]!r}, which is unknown here"
            if unknown
            else "contains a name twice"
        )
        raise WireError(
            f"{label} {what}: learner and rollout actors must have the same model and"
            " explore.modules_to_not_convert"
        )
    for entry in manifest.entries:
        target, dtype = targets[entry.name], WIRE_DTYPES.get(entry.dtype)
        if dtype is None or (dtype != target.dtype and not {dtype, target.dtype} <= set(FLOATS)):
            raise WireError(
                f"{label}: {entry.name} is {entry.dtype}, but {target.dtype} is expected"
            )
        if entry.shape != tuple(target.shape):
            raise WireError(
                f"{label}: {entry.name} is {list(entry.shape)}, but {list(target.shape)} is"
                " expected"
            )
        nbytes = target.numel() * dtype.itemsize
        if entry.nbytes != nbytes or not 0 <= entry.offset <= total - nbytes:
            raise WireError(
                f"{label}: {entry.name} lies at {entry.offset} + {entry.nbytes} of {total} bytes,"
                f" but it needs {nbytes}"
            )
        if not target.is_contiguous():
            raise WireError(f"{entry.name} is not contiguous here, so it cannot be copied into")
