"""The manifest of published weights: what the bytes of a version's shards are."""

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
"""What may travel, by torch's own name."""
WIRE_NAMES = {dtype: name for name, dtype in WIRE_DTYPES.items()}
Piece = tuple[int, slice, slice]
"""Index of a shard, slice of the shard, slice of the entry."""


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
        return xxhash.xxh3_128_hexdigest(json.dumps(asdict(self), sort_keys=True).encode())

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
        for entry in self.entries:
            parts = {index for index, _, _ in self.pieces(entry)}
            # an entry may be converted as it is copied, so it is never copied in part
            changed |= parts if any(self.hashes[i] != before.hashes[i] for i in parts) else set()
        return sorted(changed)

    def pieces(self, entry: Entry) -> Iterator[Piece]:
        """The shards and slices that hold the bytes of an entry."""
        return pieces(entry, self._starts, self.shard_sizes)

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate(self.shard_sizes, initial=0))[:-1]

    @property
    def _layout(self) -> tuple[object, ...]:
        return self.format, self.format_version, self.shard_sizes, self.entries


def pieces(entry: Entry, starts: Sequence[int], sizes: Sequence[int]) -> Iterator[Piece]:
    """The pieces of an entry over shards of ``sizes`` that begin at ``starts``."""
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
