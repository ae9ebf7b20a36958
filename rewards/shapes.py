"""Rule-based reward in [0, 1]: how well an image shows the scene that its caption describes.

A pixel is a mix of a gray and one palette color, so its deviation from its own mean gives the color
and its share. Connected regions of one color are objects. The shape of an object is the one of four
outlines of equal area and centroid that overlaps it best (intersection over union). Expected and
detected objects are then matched one to one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rewards.base import BuiltIn, Metadata, require_images
from shapes.grammar import COLOURS, RELATIONS, SHAPES, Scene, parse
from shapes.render import CROSS_ARM, DIRECTIONS, PALETTE, SIZE, distance

PARTS = ("objects", "colours", "shapes", "counts", "positions")
SMALLEST = 8.0  # pixels; smaller regions are debris, the smallest real object has 20
MAX_OBJECTS = 6  # largest objects that are considered; others are debris
WINDOW = 22  # pixels around an object that are compared with an outline
DEBRIS = 24.0  # pixels of debris that make the clean factor zero
# of each outline of radius 1: its area, and how far its centroid lies below the center of its box
_AREA = np.array([np.pi, 4 * 0.92**2, 2.0, 8 * CROSS_ARM - 4 * CROSS_ARM**2], dtype=np.float32)
_DROP = np.array([0.0, 0.0, 1 / 3, 0.0], dtype=np.float32)
_TINT = PALETTE - PALETTE.mean(1, keepdims=True)  # [6, 3]


@dataclass(frozen=True)
class Regions:
    """Detected objects of all images in one list. Lengths are in pixels."""

    owner: np.ndarray  # [R], index of the image that contains it
    centre: np.ndarray  # [R, 2], (x, y)
    colour: np.ndarray  # [R, 6], match with each color, 0..1
    shape: np.ndarray  # [R, 4], match with each shape, 0..1
    inside: np.ndarray  # [R], 0 if it touches the image's edge, else 1
    debris: np.ndarray  # [B], covered area that belongs to no object


class ShapesScorer(BuiltIn):
    """Scorer of images against captions of shapes.

    It takes uint8 [B, 3, H, W] (any size, resized to 32x32), B prompts and B metadata rows; a row
    with the key "objects" is a ``Scene.metadata``, for any other row the scene is parsed from the
    prompt. It returns float32 [B] in [0, 1]::

        mean over expected objects of colour * (0.1 + 0.9 shape)  *  counts  *  (0.3 + 0.7
        positions)  *  clean

    ``parts`` then holds float32 [B] for each of ``PARTS`` and for "strict", which is 1 if every
    object matches its color and shape, the count is exact and the relation holds. Raises ValueError
    for other inputs and for prompts outside the grammar.
    """

    def __init__(self) -> None:
        self.parts: dict[str, np.ndarray] = {}

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        require_images(images, prompts, metadata)
        if 0 in images.shape[2:]:
            raise ValueError(f"images {list(images.shape)} have no pixels")
        scenes = [
            Scene.from_metadata(row) if "objects" in row else parse(text)
            for text, row in zip(prompts, metadata, strict=True)
        ]
        if not scenes:
            self.parts = {name: np.zeros(0, dtype=np.float32) for name in (*PARTS, "strict")}
            return np.zeros(0, dtype=np.float32)
        regions = find_regions(to_size(images))
        rows = [grade(scene, regions, index) for index, scene in enumerate(scenes)]
        table = np.array(rows, dtype=np.float32).reshape(len(rows), 2 + len(PARTS))
        self.parts = {name: table[:, 1 + column] for column, name in enumerate((*PARTS, "strict"))}
        return table[:, 0].copy()


def to_size(images: np.ndarray) -> np.ndarray:
    """Resize uint8 [B, 3, H, W] to float32 [B, 3, 32, 32] by averaging areas."""
    out = images.astype(np.float32)
    for axis in (2, 3):
        length = images.shape[axis]
        if length != SIZE:
            edges = np.linspace(0, length, SIZE + 1)
            pixel = np.arange(length)
            overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
            weights = np.clip(overlap, 0, None) * (SIZE / length)
            out = np.moveaxis(np.tensordot(out, weights.astype(np.float32), (axis, 1)), -1, axis)
    return out


def connected(kind: np.ndarray) -> np.ndarray:
    """Label connected components: int32 [B, H, W], equal for 4-connected pixels of equal kind.

    Labels are unique over the batch; -1 where ``kind`` [B, H, W] < 0.
    """
    edge = np.full((kind.shape[0], kind.shape[1] + 2, kind.shape[2] + 2), -1, dtype=np.int8)
    edge[:, 1:-1, 1:-1] = kind
    label = np.where(
        edge >= 0, np.arange(edge.size, dtype=np.int32).reshape(edge.shape), np.iinfo(np.int32).max
    )
    down = (edge[:, 1:] == edge[:, :-1]) & (edge[:, 1:] >= 0)
    across = (edge[:, :, 1:] == edge[:, :, :-1]) & (edge[:, :, 1:] >= 0)
    while True:
        before = label.copy()
        for same, one, two in (
            (down, label[:, :-1], label[:, 1:]),
            (across, label[:, :, :-1], label[:, :, 1:]),
        ):
            np.copyto(two, np.minimum(one, two), where=same)
            np.copyto(one, np.minimum(one, two), where=same)
        flat = label.reshape(-1)
        inner = flat[edge.reshape(-1) >= 0]
        flat[edge.reshape(-1) >= 0] = flat[
            inner
        ]  # pointer jumping: take the label of the pixel that the label names
        if np.array_equal(before, label):
            return np.where(edge >= 0, label, -1)[:, 1:-1, 1:-1]


def find_regions(image: np.ndarray) -> Regions:
    """Detect the objects in float images [B, 3, 32, 32] of values 0..255."""
    tint = image - image.mean(1, keepdims=True)
    along = np.einsum("bchw,kc->kbhw", tint, _TINT)
    length = np.linalg.norm(_TINT, axis=1)[:, None, None, None]
    kind = (along / length).argmax(0)
    # share of the pixel that its best-matching color covers
    cover = np.clip((along / length**2).max(0), 0, 1.2)
    label = connected(np.where(cover > 0.5, kind, -1))
    names, which = np.unique(label, return_inverse=True)
    which = which.reshape(-1) - int(names[0] < 0)
    held = which >= 0
    area = np.bincount(which[held], minlength=max(1, which.max() + 1)).astype(np.float32)
    owner = np.zeros(len(area), dtype=np.int64)
    owner[which[held]] = np.repeat(np.arange(len(image)), SIZE * SIZE)[held]
    order = np.lexsort((np.arange(len(area)), -area, owner))
    rank = np.empty(len(area), dtype=np.int64)
    rank[order] = np.arange(len(area)) - np.searchsorted(owner[order], owner[order])
    kept = np.flatnonzero((area >= SMALLEST) & (rank < MAX_OBJECTS))
    loose = np.where((area >= SMALLEST) & (rank < MAX_OBJECTS), 0, area)
    debris = np.bincount(owner, weights=loose, minlength=len(image)).astype(np.float32)
    masks = np.equal(which.reshape(label.shape)[owner[kept]], kept[:, None, None])
    return measure(image, cover, masks, owner[kept], debris)


def measure(
    image: np.ndarray, cover: np.ndarray, masks: np.ndarray, owner: np.ndarray, debris: np.ndarray
) -> Regions:
    """Measure the properties of the regions ``masks`` [R, 32, 32] of images ``owner`` [R]."""
    padded: np.ndarray = np.pad(masks, ((0, 0), (1, 1), (1, 1)))
    near = (
        padded[:, :-2, 1:-1]
        | padded[:, 2:, 1:-1]
        | padded[:, 1:-1, :-2]
        | padded[:, 1:-1, 2:]
        | masks
    )
    soft = np.where(near, np.minimum(cover[owner], 1), 0)  # with the half-covered rim
    area = soft.sum((1, 2))
    axis = np.arange(SIZE, dtype=np.float32) + 0.5
    # no matrix product: its order of summation, and so its last bits, would depend on batch size
    x, y = (soft.sum(1) * axis).sum(1) / area, (soft.sum(2) * axis).sum(1) / area
    centre = np.stack([x, y], -1)
    core = masks * (cover[owner] > 0.8)
    core = np.where(np.asarray(core.any((1, 2)))[:, None, None], core, masks).astype(np.float32)
    mean = np.einsum("rchw,rhw->rc", image[owner], core) / core.sum((1, 2))[:, None].clip(1)
    off = np.linalg.norm(mean[:, None] - PALETTE, axis=-1)
    colour = np.clip(1 - (off - 25) / 60, 0, 1)
    touches = np.asarray(masks[:, [0, -1]].any((1, 2)) | masks[:, :, [0, -1]].any((1, 2)))
    inside = np.where(touches, 0.0, 1.0)
    return Regions(owner, centre, colour, shape_scores(soft, area, centre), inside, debris)


def shape_scores(soft: np.ndarray, area: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """Return the match of regions [R, 32, 32] with outlines: [R, 4], by overlap and lead."""
    overlap = overlaps(soft, area, centre)
    if not len(overlap):
        return overlap
    ordered = np.sort(overlap, 1)
    rival = np.where(overlap == ordered[:, -1:], ordered[:, -2:-1], ordered[:, -1:])
    return np.clip((overlap - 0.55) / 0.35, 0, 1) * np.clip((overlap - rival + 0.02) / 0.10, 0, 1)


def overlaps(soft: np.ndarray, area: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """Return intersection over union [R, 4] with the outlines of equal area and centroid."""
    start = np.clip(np.rint(centre - WINDOW / 2), 0, SIZE - WINDOW).astype(np.int64)
    grid = np.arange(WINDOW)
    columns, rows = start[:, 0, None] + grid, start[:, 1, None] + grid
    crop = soft[np.arange(len(soft))[:, None, None], rows[:, :, None], columns[:, None, :]]
    out = np.zeros((len(soft), len(SHAPES)), dtype=np.float32)
    for index in range(len(SHAPES)):
        radius = np.sqrt(area / _AREA[index])[:, None, None]
        x = (columns + 0.5)[:, None, :].astype(np.float32) - centre[:, 0, None, None]
        y = (
            (rows + 0.5)[:, :, None].astype(np.float32)
            - centre[:, 1, None, None]
            + _DROP[index] * radius
        )
        outline = np.clip(0.5 - distance(np.array(index), x, y, radius), 0, 1)
        both = np.minimum(outline, crop).sum((1, 2))
        out[:, index] = both / (outline.sum((1, 2)) + area - both).clip(1e-6)
    return out


def grade(scene: Scene, regions: Regions, index: int) -> tuple[float, ...]:
    """Return (total, *PARTS, strict) of image ``index``."""
    found = np.flatnonzero(regions.owner == index)
    requested, shown = len(scene.things), len(found)
    clean = max(0.0, 1 - float(regions.debris[index]) / DEBRIS)
    counts = max(0.0, 1 - abs(shown - requested) / requested)
    objects = min(shown, requested) / requested * clean
    if not shown:
        return (0.0,) * (2 + len(PARTS))
    colour = regions.colour[found][:, [COLOURS.index(thing.colour) for thing in scene.things]].T
    shape = regions.shape[found][:, [SHAPES.index(thing.shape) for thing in scene.things]].T
    match = best_match(1.01 * colour + shape)
    things = [(i, j) for i, j in enumerate(match) if j >= 0]
    colours = sum(float(colour[i, j]) for i, j in things) / requested
    shapes = sum(float(shape[i, j]) for i, j in things) / requested
    quality = sum(float(colour[i, j] * (0.1 + 0.9 * shape[i, j])) for i, j in things) / requested
    positions = place_score(scene, regions, [int(found[j]) if j >= 0 else -1 for j in match])
    total = quality * counts * (0.3 + 0.7 * positions) * clean
    right = (
        all(colour[i, j] > 0.5 and shape[i, j] > 0.33 for i, j in things)
        and shown == requested
        and positions > 0.5
    )
    return (total, objects, colours, shapes, counts, positions, float(right))


def best_match(value: np.ndarray) -> tuple[int, ...]:
    """Assign rows of ``value`` [expected, detected] to distinct columns with the greatest sum.

    Returns the column of each row, or -1. The first of equally good assignments is used.
    """
    requested, shown = value.shape
    padded = np.concatenate([value, np.zeros((requested, max(0, requested - shown)))], axis=1)
    choices = np.array(list(itertools.permutations(range(padded.shape[1]), requested)))
    best = choices[padded[np.arange(requested), choices].sum(1).argmax()]
    return tuple(int(j) if j < shown else -1 for j in best)


def place_score(scene: Scene, regions: Regions, match: Sequence[int]) -> float:
    """Return how clearly the relation of the first object to the second holds, in [0, 1].

    Without a relation, return the share of expected objects that are entirely inside the image.
    """
    if scene.relation is None:
        return sum(float(regions.inside[j]) for j in match if j >= 0) / len(match)
    if min(match) < 0:
        return 0.0
    direction = DIRECTIONS[RELATIONS.index(scene.relation)]
    offset = regions.centre[match[0]] - regions.centre[match[1]]
    along = float(offset @ direction)
    across = float(np.abs(offset * (1 - np.abs(direction))).sum())
    if along <= 0:
        return 0.0
    return min(1.0, along / 6) * min(1.0, max(0.0, (1.2 - across / along) / 0.45))
