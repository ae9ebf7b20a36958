"""Rendering of scenes to 32x32 images in numpy.

Sizes, positions and gray backgrounds are random; edges are anti-aliased by signed distance.
Positions are drawn by rejection sampling: objects keep a gap, stay inside the image, and satisfy
the caption's relation with some margin. Renders about ten thousand images per second, so that
pre-training can use as many as it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shapes.grammar import COLOURS, MAX_OBJECTS, RELATIONS, SHAPES, Scene

SIZE = 32
PALETTE = np.array(
    [(215, 40, 40), (240, 210, 40), (50, 165, 65), (60, 200, 215), (45, 80, 210), (165, 55, 195)],
    dtype=np.float32,
)  # in the order of COLOURS
GREYS = (60.0, 200.0)  # backgrounds
# half the side of an object's bounding box, by number of objects
RADII = {1: (4.5, 8.0), 2: (4.2, 6.0), 3: (3.8, 4.8)}
MARGIN = 1.0  # pixels between an object's box and the image's edge
GAP = 1.5  # pixels between two objects' boxes along at least one axis
ALONG = 1.6  # minimum ratio of the offset along a relation's axis to that across it
CANDIDATES = 48
# from the second object to the first, in the order of RELATIONS
DIRECTIONS = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)], dtype=np.float32)
CROSS_ARM = 0.36  # half the thickness of a cross's bar, in radii


def distance(shape: np.ndarray, x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """Return the signed distance (pixels, negative inside) of points to an outline.

    Arguments broadcast against each other; ``shape`` indexes SHAPES, and y points down. A triangle
    stands on its base. Distances near corners are those to the line of the nearest edge.
    """
    circle = np.hypot(x, y) - radius
    square = np.maximum(np.abs(x), np.abs(y)) - radius * 0.92
    triangle = np.maximum(y - radius, (2 * np.abs(x) - (y + radius)) / np.sqrt(5.0))
    arm = radius * CROSS_ARM
    upright = np.maximum(np.abs(x) - arm, np.abs(y) - radius)
    flat = np.maximum(np.abs(y) - arm, np.abs(x) - radius)
    cross = np.minimum(upright, flat)
    return np.select([shape == 0, shape == 1, shape == 2], [circle, square, triangle], cross)


def place(
    number: np.ndarray, relation: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return random centers [B, 3, 2] as (x, y) and radii [B, 3], in pixels.

    ``number`` [B] is the number of objects; ``relation`` [B] indexes RELATIONS, -1 for none.
    Entries beyond ``number`` are meaningless.
    """
    low, high = (np.array([RADII[int(n)][end] for n in number], dtype=np.float32) for end in (0, 1))
    radius = rng.uniform(low[:, None], high[:, None], (len(number), MAX_OBJECTS)).astype(np.float32)
    centre = np.zeros((len(number), MAX_OBJECTS, 2), dtype=np.float32)
    pending = np.arange(len(number))
    while len(pending):
        reach = (radius[pending] + MARGIN)[:, None, :, None]
        candidates = rng.uniform(
            reach, SIZE - reach, (len(pending), CANDIDATES, MAX_OBJECTS, 2)
        ).astype(np.float32)
        good = apart(candidates, radius[pending], number[pending]) & related(
            candidates, relation[pending]
        )
        first, found = good.argmax(1), good.any(1)
        centre[pending[found]] = candidates[found, first[found]]
        pending = pending[~found]
    return centre, radius


def apart(centre: np.ndarray, radius: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Return bool [B, C]: True for candidates whose objects keep the gap ``GAP``."""
    good = np.ones(centre.shape[:2], dtype=bool)
    for i in range(MAX_OBJECTS):
        for j in range(i + 1, MAX_OBJECTS):
            room = (
                np.abs(centre[:, :, i] - centre[:, :, j]).max(-1)
                >= (radius[:, i] + radius[:, j] + GAP)[:, None]
            )
            good &= room | (number <= j)[:, None]
    return good


def related(centre: np.ndarray, relation: np.ndarray) -> np.ndarray:
    """Return bool [B, C]: True for candidates that satisfy the relation, or if there is none."""
    offset = centre[:, :, 0] - centre[:, :, 1]
    direction = DIRECTIONS[relation][:, None]
    along = (offset * direction).sum(-1)
    across = np.abs(offset * (1 - np.abs(direction))).sum(-1)
    return (along > ALONG * across) | (relation < 0)[:, None]


@dataclass(frozen=True)
class Layout:
    """Positions, sizes and colors of the objects, one row per image.

    Entries of objects beyond ``number`` are meaningless.
    """

    number: np.ndarray  # [B]
    colour: np.ndarray  # [B, 3], index into COLOURS
    shape: np.ndarray  # [B, 3], index into SHAPES
    centre: np.ndarray  # [B, 3, 2], pixels
    radius: np.ndarray  # [B, 3], pixels
    grey: np.ndarray  # [B], background

    def distances(self, step: int) -> Iterator[np.ndarray]:
        """Yield the signed distance to each object, [B, SIZE/step, SIZE/step].

        Distances are those of the centers of cells of ``step`` pixels; large values if the object
        is absent.
        """
        axis = np.arange(step / 2, SIZE, step, dtype=np.float32)
        for k in range(MAX_OBJECTS):
            x = axis[None, None, :] - self.centre[:, k, 0, None, None]
            y = axis[None, :, None] - self.centre[:, k, 1, None, None]
            outline = distance(self.shape[:, k, None, None], x, y, self.radius[:, k, None, None])
            yield np.where((self.number > k)[:, None, None], outline, np.float32(2 * SIZE))


def arrange(scenes: Sequence[Scene], rng: np.random.Generator) -> Layout:
    """Choose random positions, sizes and background grays for the scenes."""
    number = np.array([len(scene.things) for scene in scenes])
    relation = np.array(
        [RELATIONS.index(scene.relation) if scene.relation else -1 for scene in scenes]
    )
    colour, shape = np.zeros((2, len(scenes), MAX_OBJECTS), dtype=np.int64)
    for row, scene in enumerate(scenes):
        for k, thing in enumerate(scene.things):
            colour[row, k], shape[row, k] = COLOURS.index(thing.colour), SHAPES.index(thing.shape)
    centre, radius = place(number, relation, rng)
    return Layout(
        number, colour, shape, centre, radius, rng.uniform(*GREYS, len(scenes)).astype(np.float32)
    )


def draw(layout: Layout) -> np.ndarray:
    """Render a layout to images uint8 [B, 3, 32, 32]."""
    image = np.broadcast_to(
        layout.grey[:, None, None, None], (len(layout.grey), 3, SIZE, SIZE)
    ).copy()
    for k, outline in enumerate(layout.distances(1)):
        cover = np.clip(0.5 - outline, 0, 1)[:, None]
        image += cover * (PALETTE[layout.colour[:, k]][:, :, None, None] - image)
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)


def cells(layout: Layout, step: int) -> np.ndarray:
    """Return the content of each cell of ``step`` pixels: int64 [B, SIZE/step, SIZE/step].

    A label is 0 for background, else 1 + color * 4 + shape.
    """
    label = np.zeros((len(layout.grey), SIZE // step, SIZE // step), dtype=np.int64)
    for k, outline in enumerate(layout.distances(step)):
        content = 1 + layout.colour[:, k] * len(SHAPES) + layout.shape[:, k]
        label = np.where(outline < step / 4, content[:, None, None], label)
    return label


def render(scenes: Sequence[Scene], rng: np.random.Generator) -> np.ndarray:
    """Render the scenes with random layouts to images uint8 [B, 3, 32, 32]."""
    return draw(arrange(scenes, rng))
