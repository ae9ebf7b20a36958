"""Cache of scores by content: an image is not scored twice for the same prompt."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
import xxhash

from rewards.base import Metadata, require_images, source_of
from rewards.combine import Attempt, WeightedScorer

Entry = tuple[float, dict[str, float]]  # score, and the scorer's parts by name
T = TypeVar("T")


class FifoCache(Generic[T]):
    """The newest ``size`` values by key; the oldest are dropped first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: OrderedDict[bytes, T] = OrderedDict()

    def get(self, key: bytes) -> T | None:
        """Return the value, or None."""
        return self._known.get(key)

    def add(self, found: Mapping[bytes, T]) -> None:
        """Store these values."""
        self._known |= found
        while len(self._known) > self._size:
            self._known.popitem(last=False)


class ScoreCache:
    """Cache of the newest ``size`` scores by (scorer, image, prompt, metadata), without failures.

    It serves evaluations, in which the same images occur again: base and trained weights before the
    first update, or a run that is evaluated twice. A cached score was computed in another batch, so
    its last bits may differ from those of a new computation.
    """

    def __init__(self, scorer: WeightedScorer, size: int = 100_000) -> None:
        self._scorer, self._known = scorer, FifoCache[Entry](size)

    def attempt(
        self,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[Metadata],
        labels: Collection[str] | None = None,
    ) -> Attempt:
        """Score as ``WeightedScorer.attempt``, computing only what is not in the cache."""
        require_images(images, prompts, metadata, clips=True)
        contents = [content_key(*row) for row in zip(images, prompts, metadata, strict=True)]
        chosen = [label for label in self._scorer.scorers if labels is None or label in labels]
        keys = {
            label: [label.encode() + b"\0" + content for content in contents] for label in chosen
        }
        entries = {
            key: entry
            for row in keys.values()
            for key in row
            if (entry := self._known.get(key)) is not None
        }
        # rows (each content once) -> the scorers that have not scored them
        unknown: dict[tuple[int, ...], list[str]] = {}
        for label, mine in keys.items():
            rows = tuple(
                row for row, key in enumerate(mine) if key not in entries and key not in mine[:row]
            )
            if rows:
                unknown.setdefault(rows, []).append(label)
        failures: list[str] = []
        unreachable: dict[str, str] = {}
        work: dict[str, tuple[int, float]] = {}
        # scorers with the same rows get one batch, so that they share preprocessing
        for rows, same in unknown.items():
            scored = self._scorer.attempt(
                images[list(rows)], [prompts[i] for i in rows], [metadata[i] for i in rows], same
            )
            failures += scored.failures
            unreachable |= scored.unreachable
            work |= scored.work
            fresh = {
                keys[label][row]: _entry(scored, label, place)
                for label in same
                for place, row in enumerate(rows)
            }
            entries |= fresh
            self._known.add({key: entry for key, entry in fresh.items() if np.isfinite(entry[0])})
        found = {label: [entries[key] for key in mine] for label, mine in keys.items()}
        return Attempt(*_columns(found), tuple(failures), unreachable, work)


def _columns(
    found: Mapping[str, Sequence[Entry]],
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return (scores by label, parts by name), float32 [B] each; NaN for missing parts."""
    scores = {label: np.array([s for s, _ in row], np.float32) for label, row in found.items()}
    parts = {
        name: np.array([parts.get(name, np.nan) for _, parts in row], np.float32)
        for row in found.values()
        for name in sorted({name for _, parts in row for name in parts})
    }
    return scores, parts


def _entry(scored: Attempt, label: str, place: int) -> Entry:
    """Return the cache entry of one scorer and image."""
    own = {name: values for name, values in scored.parts.items() if name.startswith(f"{label}/")}
    return float(scored.scores[label][place]), {
        name: float(values[place]) for name, values in own.items()
    }


def content_key(image: np.ndarray, prompt: str, metadata: Metadata) -> bytes:
    """Return a 128-bit hash of everything that a score may depend on."""
    total, source = xxhash.xxh3_128(), source_of(metadata)
    if source is not None:
        pixels = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(source).tobytes())
        metadata = {**metadata, "image": [source.shape, pixels]}
    for part in (repr(image.shape), prompt, json.dumps(metadata, sort_keys=True, default=repr)):
        total.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    total.update(np.ascontiguousarray(image).tobytes())
    return total.digest()
