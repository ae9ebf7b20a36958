"""Rules of GenEval (arXiv 2310.11513): comparison of detected objects with a prompt's metadata.

The metadata of a prompt has ``tag``; ``include``, a list of {class, count, color, position}, of
which color and position are optional and position is [relation, index of an earlier entry]; and
``exclude``, a list of {class, count}.
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
"""Least offset of the centers of two objects that counts, as a share of the sum of their sizes."""
MIN_AXIS_SHARE = 0.5
"""Least share of the distance along an axis for a relation to hold.

A diagonal neighbor is both beside and above.
"""


@dataclass(frozen=True)
class Detection:
    """A detected object; ``box``: left, top, right, bottom in pixels."""

    box: tuple[float, float, float, float]
    score: float
    mask: np.ndarray | None = field(default=None, compare=False)  # bool [H, W]


Objects = Mapping[str, Sequence[Detection]]
"""Detected objects by class, in descending order of score."""
ColorsOf = Callable[[str, Sequence[Detection]], list[str]]
"""Function that returns the color of each of several objects of a class."""


@dataclass(frozen=True)
class Requirement:
    """Entry of ``include``. ``above``: the least number that is too many; None: no limit."""

    name: str
    count: int
    color: str | None = None
    relation: str | None = None
    target: int = -1
    above: int | None = None


@dataclass(frozen=True)
class Outcome:
    """Result for one image: GenEval's verdict, and the share that is fulfilled (1 if correct)."""

    correct: bool
    share: float


def parse_requirements(
    prompt: str, metadata: Metadata, classes: Iterable[str]
) -> list[Requirement]:
    """Parse a prompt's metadata. Raises ValueError if it is not GenEval's."""
    known = set(classes)
    limits = {row["class"]: row["count"] for row in _rows(prompt, metadata, "exclude", known)}
    rows = _rows(prompt, metadata, "include", known)
    if not rows:
        raise ValueError(f"prompt {prompt!r} has no GenEval metadata: 'include' is missing")
    entries = []
    for index, row in enumerate(rows):
        relation, target = row.get("position") or (None, -1)
        color = row.get("color")
        if color not in (None, *COLORS) or relation not in (None, *RELATIONS):
            raise ValueError(
                f"prompt {prompt!r}: unknown to GenEval: color {color!r}, relation {relation!r}"
            )
        if relation is not None and not 0 <= target < index:
            raise ValueError(
                f"prompt {prompt!r}: 'position' refers to {target}, which is not an earlier entry"
            )
        name = row["class"]
        entries.append(Requirement(name, row["count"], color, relation, target, limits.get(name)))
    # a class that is only excluded becomes an entry with count 0
    others = limits.keys() - {entry.name for entry in entries}
    return [*entries, *(Requirement(name, 0, above=limits[name]) for name in sorted(others))]


def _rows(prompt: str, metadata: Metadata, key: str, known: set[str]) -> list[dict]:
    rows = metadata.get(key) or []
    for row in rows:
        count = row.get("count")
        if row.get("class") not in known or not isinstance(count, int) or count < 1:
            raise ValueError(
                f"prompt {prompt!r}: {key!r} has {row}, which is not a class with a count"
            )
    return rows


def assess(entries: Sequence[Requirement], objects: Objects, colors_of: ColorsOf) -> Outcome:
    """Compare detected objects with the entries of a prompt.

    The verdict is GenEval's. Of each class, the ``count`` objects with the highest scores are
    considered. They must exist, all have the entry's color, and all have its relation to the
    objects of the entry that it refers to, which must itself be fulfilled; and no excluded count
    may be reached. The share is the mean over entries of how close the count is, halved if an entry
    has a color or a position and is not fulfilled.
    """
    groups: list[Sequence[Detection] | None] = []
    correct, shares = True, []
    for entry in entries:
        detected = objects.get(entry.name, ())
        group = list(detected)[: entry.count]
        ok = (
            len(group) == entry.count
            and _colored(entry, group, colors_of)
            and _placed(entry, group, groups)
        )
        groups.append(group if ok else None)
        plain = entry.color is None and entry.relation is None
        shares.append(_nearness(entry, len(detected)) * (1.0 if ok or plain else 0.5))
        correct &= ok and not (entry.above is not None and len(detected) >= entry.above)
    return Outcome(correct, 1.0 if correct else sum(shares) / len(shares))


def _nearness(entry: Requirement, count: int) -> float:
    """Return 1 for the wanted count, less 1 / count for each object missing or in excess."""
    missing = max(0, entry.count - count)
    surplus = 0 if entry.above is None else max(0, count - (entry.above - 1))
    return max(0.0, 1.0 - (missing + surplus) / max(1, entry.count))


def _colored(entry: Requirement, group: Sequence[Detection], colors_of: ColorsOf) -> bool:
    return entry.color is None or set(colors_of(entry.name, group)) == {entry.color}


def _placed(
    entry: Requirement, group: Sequence[Detection], groups: Sequence[Sequence[Detection] | None]
) -> bool:
    if entry.relation is None:
        return True
    targets = groups[entry.target]
    return targets is not None and all(
        entry.relation in relations(one, other) for one in group for other in targets
    )


def relations(one: Detection, other: Detection) -> set[str]:
    """Return the RELATIONS of ``one`` to ``other``: up to two, none if they overlap."""
    offsets, apart = [], []
    for low, high in ((0, 2), (1, 3)):
        offset = (one.box[low] + one.box[high] - other.box[low] - other.box[high]) / 2
        sizes = abs(one.box[high] - one.box[low]) + abs(other.box[high] - other.box[low])
        offsets.append(offset)
        apart.append(math.copysign(max(abs(offset) - MARGIN * sizes, 0.0), offset))
    if all(abs(each) < 1e-3 for each in apart):
        return set()
    x, y = (each / math.hypot(*offsets) for each in apart)
    named = zip(
        RELATIONS,
        (x < -MIN_AXIS_SHARE, x > MIN_AXIS_SHARE, y < -MIN_AXIS_SHARE, y > MIN_AXIS_SHARE),
        strict=True,
    )
    return {name for name, holds in named if holds}
