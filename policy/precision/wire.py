"""Published weights: named tensors as shards of bytes, with a manifest that verifies them."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
import xxhash
from torch import Tensor

from configs.section import Tree
from policy.precision.backends import wire_formats

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TRAVEL = (torch.uint8, torch.float8_e4m3fn, *FLOATS)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TRAVEL}
"""What may travel, by torch's own name."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class WireError(RuntimeError):
    """Published bytes that differ from their manifest, or from what the model here needs."""


@dataclass(frozen=True)
class Entry:
    """One tensor: ``nbytes`` bytes from ``offset`` of the concatenated shards, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    """What the shards of one version hold.

    ``format`` and ``format_version`` say what the buffers mean. ``hashes``: xxh3-64 of the shards,
    in hex.
    """

    version: int
    format: str
    format_version: int
    shard_sizes: tuple[int, ...]
    hashes: tuple[str, ...]
    entries: tuple[Entry, ...]

    @cached_property
    def checksum(self) -> str:
        """xxh3-128 of all fields, hex: equal checksums mean equal weights of equal version."""
        # it finds damage and mistakes, not forgers, at the speed of memory
        return xxhash.xxh3_128_hexdigest(json.dumps(self.to_dict(), sort_keys=True).encode())

    @property
    def nbytes(self) -> int:
        """Size of all shards."""
        return sum(self.shard_sizes)

    def changed_since(self, before: Manifest | None) -> list[int]:
        """The shards that are sent to one who holds ``before``: all shards of every tensor of
        which some bytes differ, and all there are where the two lay out their tensors differently.
        """
        everything = range(len(self.hashes))
        if before is None or self._layout != before._layout:
            return list(everything)
        changed = {index for index in everything if self.hashes[index] != before.hashes[index]}
        starts = list(accumulate(self.shard_sizes, initial=0))[:-1]
        for entry in self.entries:
            parts = {index for index, _, _ in _pieces(entry, starts, self.shard_sizes)}
            # an entry may be converted as it is copied, so it is never copied in part
            changed |= parts if any(self.hashes[i] != before.hashes[i] for i in parts) else set()
        return sorted(changed)

    @property
    def _layout(self) -> tuple[object, ...]:
        return self.format, self.format_version, self.shard_sizes, self.entries

    def to_dict(self) -> Tree:
        """Plain JSON types."""
        # once through JSON: tuples are lists then, here as on the other side
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_dict(cls, plain: Tree) -> Manifest:
        """The inverse of ``to_dict``. Raises WireError for anything else."""
        try:
            entries = tuple(
                Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in plain["entries"]
            )
            return cls(
                plain["version"],
                plain["format"],
                plain["format_version"],
                tuple(plain["shard_sizes"]),
                tuple(plain["hashes"]),
                entries,
            )
        except (KeyError, TypeError) as error:
            raise WireError(f"this is no manifest of published weights: {error!r}") from error


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
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"{name} is {tensor.dtype}; what travels is one of {', '.join(DTYPES)}"
            )
        nbytes = tensor.numel() * tensor.element_size()
        entries.append(Entry(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), offset, nbytes))
        offset += nbytes
    sizes = [min(shard_bytes, offset - start) for start in range(0, offset, shard_bytes)]
    shards = tuple(np.empty(size, np.uint8) for size in sizes)
    starts = list(range(0, offset, shard_bytes))
    for entry, tensor in zip(entries, named.values(), strict=True):
        source = _bytes(tensor.detach().cpu().contiguous()).numpy()
        for shard, inside, piece in _pieces(entry, starts, sizes):
            shards[shard][inside] = source[piece]
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


def pack_tensors(
    named: dict[str, Tensor], version: int, format: str, shard_bytes: int
) -> tuple[Manifest, list[np.ndarray]]:
    """A version of one section."""
    return assemble([pack_section(named, shard_bytes)], version, format)


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
            f" here it is {here}: learner and explorers must run the same Sol-RL"
        )
    # all checks before the first copy: half a version would be a policy that nobody published
    _check_shards(manifest, shards, before)
    _check_targets(manifest, targets)
    starts = list(accumulate(manifest.shard_sizes, initial=0))[:-1]
    with torch.no_grad():
        for entry in manifest.entries:
            pieces = [
                (shards[index], inside, piece)
                for index, inside, piece in _pieces(entry, starts, manifest.shard_sizes)
            ]
            arrived = [
                (shard, inside, piece) for shard, inside, piece in pieces if shard is not None
            ]
            if len(arrived) == len(pieces):  # else none of its bytes has changed
                _copy(DTYPES[entry.dtype], targets[entry.name], arrived)


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


def _pieces(
    entry: Entry, starts: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, slice, slice]]:
    """(shard, slice of the shard, slice of the entry) of an entry over shards that begin at
    ``starts``.
    """
    start, end = entry.offset, entry.offset + entry.nbytes
    while start < end:
        shard = bisect_right(starts, start) - 1
        inside = start - starts[shard]
        length = min(sizes[shard] - inside, end - start)
        yield (
            shard,
            slice(inside, inside + length),
            slice(start - entry.offset, start - entry.offset + length),
        )
        start += length


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
        target, dtype = targets[entry.name], DTYPES.get(entry.dtype)
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
