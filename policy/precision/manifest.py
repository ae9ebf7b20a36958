"""Manifest of published weights: describes the bytes in a version's shards."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate

import torch
import xxhash

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TRAVEL = (torch.uint8, torch.float8_e4m3fn, *FLOATS)
WIRE_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TRAVEL}
"""The dtypes that may be published, by torch's name."""
WIRE_NAMES = {dtype: name for name, dtype in WIRE_DTYPES.items()}
Piece = tuple[int, slice, slice]
"""Index of a shard, slice of the shard, slice of the entry."""


class WireError(RuntimeError):
    """Published weights do not match their manifest, or do not fit this model."""


@dataclass(frozen=True)
class Entry:
    """One tensor, row-major: ``nbytes`` bytes at ``offset`` in the concatenated shards."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    """The contents of the shards of one version.

    ``format`` and ``format_version`` define the meaning of the buffers. ``hashes`` are the xxh3-64
    hashes of the shards in hex.
    """

    version: int
    format: str
    format_version: int
    shard_sizes: tuple[int, ...]
    hashes: tuple[str, ...]
    entries: tuple[Entry, ...]

    @cached_property
    def checksum(self) -> str:
        """xxh3-128 of all fields in hex; equal checksums mean equal weights and version."""
        # not cryptographic: detects damage and mistakes, not forgery, at memory speed
        return xxhash.xxh3_128_hexdigest(json.dumps(asdict(self), sort_keys=True).encode())

    @property
    def nbytes(self) -> int:
        """Size of all shards in bytes."""
        return sum(self.shard_sizes)

    def changed_since(self, before: Manifest | None) -> list[int]:
        """Return the indices of the shards to send to a receiver that holds ``before``.

        These are all shards of every tensor of which some bytes differ, and all shards if the
        layout of the tensors differs or ``before`` is None.
        """
        everything = range(len(self.hashes))
        if before is None or self._layout != before._layout:
            return list(everything)
        changed = {index for index in everything if self.hashes[index] != before.hashes[index]}
        for entry in self.entries:
            parts = {index for index, _, _ in self.pieces(entry)}
            # whole entries, because a partial copy could not be converted to the target dtype
            changed |= parts if any(self.hashes[i] != before.hashes[i] for i in parts) else set()
        return sorted(changed)

    def pieces(self, entry: Entry) -> Iterator[Piece]:
        """Yield the shards and slices that hold the bytes of an entry."""
        return pieces(entry, self._starts, self.shard_sizes)

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate(self.shard_sizes, initial=0))[:-1]

    @property
    def _layout(self) -> tuple[object, ...]:
        return self.format, self.format_version, self.shard_sizes, self.entries


def pieces(entry: Entry, starts: Sequence[int], sizes: Sequence[int]) -> Iterator[Piece]:
    """Yield the pieces of an entry in shards of ``sizes`` that start at ``starts``."""
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
