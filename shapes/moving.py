"""Scenes to clips: the objects of an image drift, each at a speed of its own, and the caption holds
in every frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from shapes.data import Pool
from shapes.grammar import RELATIONS, Scene
from shapes.render import MARGIN, SIZE, Layout, apart, arrange, cells, draw, related

FRAMES = 9
EVERY = 4  # frames that the autoencoder makes at a time, after the first
FARTHEST = 9.0  # pixels along each axis that an object moves in a clip
CANDIDATES = 48


def drift(layout: Layout, scenes: list[Scene], rng: np.random.Generator) -> np.ndarray:
    """How far each object moves in a clip [B, 3, 2]: the first of some random ways, which become
    shorter, at whose middle and end all objects are inside the image and apart, and the relation
    holds; the last is not to move.
    """
    relation = np.array([RELATIONS.index(s.relation) if s.relation else -1 for s in scenes])
    shape = (len(scenes), CANDIDATES, *layout.centre.shape[1:])
    shorter = np.linspace(FARTHEST, 0, CANDIDATES)[:, None, None]
    tries = (shorter * rng.uniform(-1, 1, shape)).astype(np.float32)
    reach = (layout.radius + MARGIN)[:, None, :, None]
    absent = (np.arange(layout.radius.shape[1]) >= layout.number[:, None])[:, None, :, None]
    good = np.ones(tries.shape[:2], dtype=bool)
    for share in (0.5, 1.0):
        centre = layout.centre[:, None] + share * tries
        good &= (((centre >= reach) & (centre <= SIZE - reach)) | absent).all((2, 3))
        good &= apart(centre, layout.radius, layout.number) & related(centre, relation)
    good[:, -1] = True  # as placed, up to rounding
    return tries[np.arange(len(scenes)), good.argmax(1)]


def moments(layout: Layout, moved: np.ndarray) -> Iterator[Layout]:
    """The layout at each frame of a clip."""
    for frame in range(FRAMES):
        yield replace(layout, centre=layout.centre + frame / (FRAMES - 1) * moved)


class ClipPool(Pool):
    """Random scenes of the train split and their clips, from one seed."""

    def clips(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(uint8 [count, F, 3, 32, 32], int [count] indices into ``scenes``, int64
        [count, 1 + (F - 1)/4, 8, 8]: what lies in each cell of 4 pixels in the middle of the frames
        that share a latent frame).
        """
        which = self.rng.choice(len(self.scenes), count, p=self.chances)
        scenes = [self.scenes[i] for i in which]
        layout = arrange(scenes, self.rng)
        at = list(moments(layout, drift(layout, scenes, self.rng)))
        shown = [at[0], *at[1 + EVERY // 2 :: EVERY]]
        return (
            np.stack([draw(moment) for moment in at], 1),
            which,
            np.stack([cells(moment, 4) for moment in shown], 1),
        )
