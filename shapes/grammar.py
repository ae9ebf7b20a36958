"""Grammar of the shapes data: scenes, their captions, and the held-out split.

A scene is one of four kinds: ``one`` object, ``two`` objects, a ``relation`` between two objects,
or a ``count`` of two or three equal objects. Two objects in one scene always differ in color.

The split is over *combinations*, not over sentences. The unit of ``two`` and ``relation`` scenes is
the unordered pair of objects ({red circle, blue square}); the unit of ``count`` scenes is (number,
color, shape). A unit belongs to exactly one of ``train`` (pre-training and RL), ``tune`` (choosing
settings) and ``test`` (reported numbers), by the order of a hash of its name, so the split never
changes. Scenes of one object are always ``train``, because a model must have seen each object once.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

COLOURS = ("red", "yellow", "green", "cyan", "blue", "purple")
SHAPES = ("circle", "square", "triangle", "cross")
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three"}
KINDS = ("one", "two", "relation", "count")
SPLITS = ("train", "tune", "test")
MAX_OBJECTS = max(NUMBERS)
TEST_PAIRS, TUNE_PAIRS = 60, 20  # of 240
TEST_COUNTS, TUNE_COUNTS = 12, 6  # of 48
_OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
_THING = rf"({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})"
_PAIR = re.compile(rf"an? {_THING} (and|{'|'.join(RELATIONS)}) an? {_THING}")
_ONE = re.compile(rf"an? {_THING}")
_COUNT = re.compile(
    rf"({'|'.join(NUMBERS.values())}) ({'|'.join(COLOURS)}) ({'|'.join(s + 'e?s' for s in SHAPES)})"
)


@dataclass(frozen=True, order=True)
class Thing:
    """One object: a color of ``COLOURS`` and a shape of ``SHAPES``."""

    colour: str
    shape: str

    def __post_init__(self) -> None:
        if self.colour not in COLOURS or self.shape not in SHAPES:
            raise ValueError(
                f"no such object: {self.colour!r} {self.shape!r}; colours are {COLOURS}, shapes are"
                f" {SHAPES}"
            )

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """Content of an image.

    ``things`` are in the order of the caption; ``relation`` is that of the first to the second.
    """

    kind: str
    things: tuple[Thing, ...]
    relation: str | None = None

    def __post_init__(self) -> None:
        expected = {"one": (1,), "two": (2,), "relation": (2,), "count": tuple(NUMBERS)}.get(
            self.kind, ()
        )
        if len(self.things) not in expected or (self.relation in RELATIONS) != (
            self.kind == "relation"
        ):
            raise ValueError(
                f"invalid scene: kind {self.kind!r}, {len(self.things)} objects, relation"
                f" {self.relation!r}; kinds are {KINDS}"
            )

    @property
    def caption(self) -> str:
        """The English sentence for this scene, in lower case, without a period."""
        first = self.things[0]
        if self.kind == "count":
            return f"{NUMBERS[len(self.things)]} {plural(first)}"
        if self.kind == "one":
            return f"a {first}"
        return f"a {first} {self.relation or 'and'} a {self.things[1]}"

    @property
    def unit(self) -> tuple[str, ...]:
        """Combination by which the scene is assigned to a split.

        It is the same for both orders and all relations of a pair of objects.
        """
        if self.kind == "count":
            return ("count", str(len(self.things)), str(self.things[0]))
        return (
            "one" if self.kind == "one" else "pair",
            *sorted(str(thing) for thing in self.things),
        )

    @property
    def split(self) -> str:
        """Split of the scene: ``train``, ``tune`` or ``test``."""
        return _split_of_units().get(self.unit, "train")

    def metadata(self) -> dict[str, Any]:
        """Return the scene as plain JSON values, the inverse of ``from_metadata``."""
        things = [{"colour": thing.colour, "shape": thing.shape} for thing in self.things]
        return {"kind": self.kind, "objects": things, "relation": self.relation}

    @classmethod
    def from_metadata(cls, row: dict[str, Any]) -> Scene:
        """Return the scene that ``row`` describes.

        Raises ValueError if ``row`` is not the output of ``metadata``.
        """
        try:
            things = tuple(Thing(item["colour"], item["shape"]) for item in row["objects"])
            return cls(row["kind"], things, row.get("relation"))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the metadata of a shapes scene ({error!r}): {row!r}") from error


def plural(thing: Thing) -> str:
    """Return the plural of an object: 'red circles', 'blue crosses'."""
    return f"{thing}{'es' if thing.shape == 'cross' else 's'}"


def parse(caption: str) -> Scene:
    """Parse a caption. Raises ValueError for a sentence outside the grammar."""
    text = " ".join(
        caption.lower().replace("to the left", "left").replace("to the right", "right").split()
    ).rstrip(". ")
    if match := _PAIR.fullmatch(text):
        colour_a, shape_a, link, colour_b, shape_b = match.groups()
        things = (Thing(colour_a, shape_a), Thing(colour_b, shape_b))
        return Scene("two", things) if link == "and" else Scene("relation", things, link)
    if match := _COUNT.fullmatch(text):
        number = next(n for n, word in NUMBERS.items() if word == match[1])
        shape = next(s for s in SHAPES if match[3].startswith(s))
        return Scene("count", (Thing(match[2], shape),) * number)
    if match := _ONE.fullmatch(text):
        return Scene("one", (Thing(match[1], match[2]),))
    raise ValueError(
        f"not a caption of the shapes grammar: {caption!r}; an example is 'a red circle left of a"
        " blue square'"
    )


def flipped(scene: Scene) -> Scene:
    """Return the same scene described from its second object (only 'two' and 'relation')."""
    return Scene(
        scene.kind, scene.things[::-1], _OPPOSITE[scene.relation] if scene.relation else None
    )


@lru_cache(maxsize=1)
def all_scenes() -> tuple[Scene, ...]:
    """Return every scene of the grammar, in a fixed order."""
    things = [Thing(colour, shape) for colour in COLOURS for shape in SHAPES]
    pairs = [(a, b) for a, b in itertools.product(things, things) if a.colour != b.colour]
    scenes = [Scene("one", (thing,)) for thing in things]
    scenes += [Scene("two", pair) for pair in pairs]
    scenes += [Scene("relation", pair, relation) for pair in pairs for relation in RELATIONS]
    scenes += [Scene("count", (thing,) * number) for number in NUMBERS for thing in things]
    return tuple(scenes)


def scenes_of(split: str, kind: str) -> list[Scene]:
    """Return the scenes of one kind in one split, in a fixed order.

    Raises ValueError for an unknown split or kind.
    """
    if split not in SPLITS or kind not in KINDS:
        raise ValueError(
            f"no scenes of split {split!r} and kind {kind!r}: splits are {SPLITS}, kinds are"
            f" {KINDS}"
        )
    return [scene for scene in all_scenes() if scene.kind == kind and scene.split == split]


def hash_order(name: object) -> bytes:
    """Return a sort key: a fixed pseudo-random order, the same on all machines and versions."""
    return hashlib.blake2b(repr(name).encode(), digest_size=8).digest()


@lru_cache(maxsize=1)
def _split_of_units() -> dict[tuple[str, ...], str]:
    """Map every unit that is held out to ``tune`` or ``test``."""
    units = {scene.unit for scene in all_scenes()}
    split: dict[tuple[str, ...], str] = {}
    for head, tests, tunes in (
        ("pair", TEST_PAIRS, TUNE_PAIRS),
        ("count", TEST_COUNTS, TUNE_COUNTS),
    ):
        ordered = sorted((unit for unit in units if unit[0] == head), key=hash_order)
        split |= dict.fromkeys(ordered[:tests], "test") | dict.fromkeys(
            ordered[tests : tests + tunes], "tune"
        )
    return split
