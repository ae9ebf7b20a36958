"""Scores by content: a picture that was scored for a prompt is not scored again."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import xxhash

from rewards.base import require_pictures
from rewards.combine import Attempt, WeightedScorer

Entry = tuple[float, dict[str, float]]  # score, and the scorer's parts by name


class ScoreCache:
    """Remembers the scores of the newest ``size`` (scorer, picture, prompt, metadata). A failure is not remembered.

    Made for evaluation, where the same pictures come again: base and trained weights before the first update, a run that is
    evaluated twice. What is remembered was scored in another batch, so the last bits may differ from scoring anew.
    """

    def __init__(self, scorer: WeightedScorer, size: int = 100_000) -> None:
        self._scorer, self._size = scorer, size
        self._known: OrderedDict[bytes, Entry] = OrderedDict()
        self.hits = 0

    def attempt(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]], labels: Collection[str] | None = None
    ) -> Attempt:
        """As ``WeightedScorer.attempt``, for the pictures that are not known."""
        require_pictures(images, prompts, metadata)
        contents = [_content(*row) for row in zip(images, prompts, metadata, strict=True)]
        chosen = [label for label in self._scorer.scorers if labels is None or label in labels]
        made = [self._one(label, contents, images, prompts, metadata) for label in chosen]
        return Attempt(
            {label: scores for part in made for label, scores in part.scores.items()},
            {name: values for part in made for name, values in part.parts.items()},
            tuple(failure for part in made for failure in part.failures),
            {label: seconds for part in made for label, seconds in part.seconds.items()},
        )

    def _one(
        self, label: str, contents: list[bytes], images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Attempt:
        """One scorer: the unknown pictures, each content once, and then everything from memory."""
        keys = [label.encode() + b"\0" + content for content in contents]
        new = [row for row, key in enumerate(keys) if key not in self._known and key not in keys[:row]]
        self.hits += len(keys) - len(new)
        entries: dict[bytes, Entry] = {key: self._known[key] for key in keys if key in self._known}
        failures: tuple[str, ...] = ()
        seconds: dict[str, float] = {}
        if new:
            scored = self._scorer.attempt(images[new], [prompts[i] for i in new], [metadata[i] for i in new], [label])
            failures, seconds = scored.failures, scored.seconds
            for place, row in enumerate(new):
                parts = {name: float(values[place]) for name, values in scored.parts.items()}
                entries[keys[row]] = float(scored.scores[label][place]), parts
            self._remember({keys[row]: entries[keys[row]] for row in new})
        rows = [entries[key] for key in keys]
        names = {name for _, parts in rows for name in parts}
        return Attempt(
            {label: np.array([score for score, _ in rows], np.float32)},
            {name: np.array([parts.get(name, np.nan) for _, parts in rows], np.float32) for name in sorted(names)},
            failures,
            seconds,
        )

    def _remember(self, entries: dict[bytes, Entry]) -> None:
        self._known |= {key: entry for key, entry in entries.items() if np.isfinite(entry[0])}
        while len(self._known) > self._size:
            self._known.popitem(last=False)


def _content(image: np.ndarray, prompt: str, metadata: dict[str, Any]) -> bytes:
    """128 bits over everything that a score may depend on."""
    total = xxhash.xxh3_128()
    for part in (repr(image.shape), prompt, json.dumps(metadata, sort_keys=True, default=repr)):
        total.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    total.update(np.ascontiguousarray(image).tobytes())
    return total.digest()
