"""What a GenEval prompt asks of an image, and how far the objects found in it fulfil that.

GenEval (arXiv 2310.11513) goes by the objects that a detector finds. A prompt's metadata
has ``tag``; ``include``, a list of {class, count, color, position}, where color and position may be
missing and position is [relation, index of an earlier entry]; and ``exclude``, of {class, count}.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rewards.base import Metadata

COLORS = (
    "red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white",
)  # fmt: skip
RELATIONS = ("left of", "right of", "above", "below")
MARGIN = 0.1
"""Share of both objects' sizes by which centres must differ before they count as apart."""
SLANT = 0.5
"""Least share of the distance in a direction: a diagonal neighbour is both beside and above."""


@dataclass(frozen=True)
class Found:
    """A detected object; ``box``: left, top, right, bottom in pixels."""

    box: tuple[float, float, float, float]
    score: float
    mask: np.ndarray | None = field(default=None, compare=False)  # bool [H, W]


Objects = Mapping[str, Sequence[Found]]
"""What was found by class, the most certain first."""
ColorsOf = Callable[[str, Sequence[Found]], list[str]]
"""From a class and objects of it: the color of each."""


@dataclass(frozen=True)
class Wanted:
    """An entry of ``include``. ``above``: 1 + the most that may be there, None: any number."""

    name: str
    count: int
    color: str | None = None
    relation: str | None = None
    target: int = -1
    above: int | None = None


@dataclass(frozen=True)
class Outcome:
    """``correct``: GenEval's own verdict. ``share``: how much of it is fulfilled, 1 if correct."""

    correct: bool
    share: float


def wanted(prompt: str, metadata: Metadata, classes: Iterable[str]) -> list[Wanted]:
    """What a prompt asks for. Raises ValueError for metadata that is not GenEval's."""
    known = set(classes)
    limits = {row["class"]: row["count"] for row in _rows(prompt, metadata, "exclude", known)}
    rows = _rows(prompt, metadata, "include", known)
    if not rows:
        raise ValueError(f"prompt {prompt!r} has no GenEval metadata: 'include' is missing")
    found = []
    for index, row in enumerate(rows):
        relation, target = row.get("position") or (None, -1)
        color = row.get("color")
        if color not in (None, *COLORS) or relation not in (None, *RELATIONS):
            raise ValueError(f"prompt {prompt!r}: GenEval knows no {color or ''} {relation or ''}")
        if relation is not None and not 0 <= target < index:
            raise ValueError(f"prompt {prompt!r}: 'position' refers to {target}, no earlier entry")
        name = row["class"]
        found.append(Wanted(name, row["count"], color, relation, target, limits.get(name)))
    # what is only excluded is wanted no times
    others = limits.keys() - {entry.name for entry in found}
    return [*found, *(Wanted(name, 0, above=limits[name]) for name in sorted(others))]


def _rows(prompt: str, metadata: Metadata, key: str, known: set[str]) -> list[dict]:
    rows = metadata.get(key) or []
    for row in rows:
        count = row.get("count")
        if row.get("class") not in known or not isinstance(count, int) or count < 1:
            raise ValueError(f"prompt {prompt!r}: {key!r} has {row}: no class and count")
    return rows


def assess(entries: Sequence[Wanted], objects: Objects, colors_of: ColorsOf) -> Outcome:
    """Compare what was found with what is wanted.

    The verdict is GenEval's: of each class the ``count`` most certain objects are looked at; they
    must be there, all have the color, and all stand so to those of the entry that they refer to,
    which must be right itself; and no excluded number is reached. The share is the mean over
    entries of how near the number is; color and position count half of theirs.
    """
    groups: list[Sequence[Found] | None] = []
    correct, shares = True, []
    for entry in entries:
        there = objects.get(entry.name, ())
        group = list(there)[: entry.count]
        ok = (
            len(group) == entry.count
            and _colored(entry, group, colors_of)
            and _placed(entry, group, groups)
        )
        groups.append(group if ok else None)
        plain = entry.color is None and entry.relation is None
        shares.append(_nearness(entry, len(there)) * (1.0 if ok or plain else 0.5))
        correct &= ok and not (entry.above is not None and len(there) >= entry.above)
    return Outcome(correct, 1.0 if correct else sum(shares) / len(shares))


def _nearness(entry: Wanted, count: int) -> float:
    """1 for the wanted number, less by 1 / number for each that is missing or too many."""
    missing = max(0, entry.count - count)
    surplus = 0 if entry.above is None else max(0, count - (entry.above - 1))
    return max(0.0, 1.0 - (missing + surplus) / max(1, entry.count))


def _colored(entry: Wanted, group: Sequence[Found], colors_of: ColorsOf) -> bool:
    return entry.color is None or set(colors_of(entry.name, group)) == {entry.color}


def _placed(
    entry: Wanted, group: Sequence[Found], groups: Sequence[Sequence[Found] | None]
) -> bool:
    if entry.relation is None:
        return True
    targets = groups[entry.target]
    return targets is not None and all(
        entry.relation in relations(one, other) for one in group for other in targets
    )


def relations(one: Found, other: Found) -> set[str]:
    """Where ``one`` is, seen from ``other``: up to two of RELATIONS, none where they overlap."""
    offsets, apart = [], []
    for low, high in ((0, 2), (1, 3)):
        offset = (one.box[low] + one.box[high] - other.box[low] - other.box[high]) / 2
        sizes = abs(one.box[high] - one.box[low]) + abs(other.box[high] - other.box[low])
        offsets.append(offset)
        apart.append(math.copysign(max(abs(offset) - MARGIN * sizes, 0.0), offset))
    if all(abs(each) < 1e-3 for each in apart):
        return set()
    x, y = (each / math.hypot(*offsets) for each in apart)
    named = zip(RELATIONS, (x < -SLANT, x > SLANT, y < -SLANT, y > SLANT), strict=True)
    return {name for name, holds in named if holds}
