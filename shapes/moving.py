"""Clips of moving scenes: the objects drift, each at its own speed.

The caption holds in every frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from shapes.data import Pool
from shapes.grammar import RELATIONS, Scene
from shapes.render import MARGIN, SIZE, Layout, apart, arrange, cells, draw, related

FRAMES = 9
EVERY = 4  # frames per latent frame, after the first
FARTHEST = 9.0  # maximum displacement of an object in a clip, in pixels along each axis
CANDIDATES = 48


def drift(layout: Layout, scenes: list[Scene], rng: np.random.Generator) -> np.ndarray:
    """Return the displacement of each object over a clip, in pixels [B, 3, 2].

    Tries random displacements of decreasing length and takes the first one for which, in the middle
    and at the end of the clip, all objects are inside the image and apart and the relation holds.
    The last candidate is no motion, which is always valid.
    """
    relation = np.array([RELATIONS.index(s.relation) if s.relation else -1 for s in scenes])
    shape = (len(scenes), CANDIDATES, *layout.centre.shape[1:])
    lengths = np.linspace(FARTHEST, 0, CANDIDATES)[:, None, None]
    tries = (lengths * rng.uniform(-1, 1, shape)).astype(np.float32)
    reach = (layout.radius + MARGIN)[:, None, :, None]
    absent = (np.arange(layout.radius.shape[1]) >= layout.number[:, None])[:, None, :, None]
    good = np.ones(tries.shape[:2], dtype=bool)
    for time in (0.5, 1.0):
        centre = layout.centre[:, None] + time * tries
        good &= (((centre >= reach) & (centre <= SIZE - reach)) | absent).all((2, 3))
        good &= apart(centre, layout.radius, layout.number) & related(centre, relation)
    good[:, -1] = True  # no motion: valid, but rounding may make the check fail
    return tries[np.arange(len(scenes)), good.argmax(1)]


def moments(layout: Layout, moved: np.ndarray) -> Iterator[Layout]:
    """Yield the layout at each frame of a clip."""
    for frame in range(FRAMES):
        yield replace(layout, centre=layout.centre + frame / (FRAMES - 1) * moved)


class ClipPool(Pool):
    """Random scenes of the train split and their clips, from one seed."""

    def clips(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (clips, scene indices, cell labels).

        Clips are uint8 [count, F, 3, 32, 32], and indices into ``scenes`` int [count]. Labels are
        int64 [count, 1 + (F - 1)/4, 8, 8]: the content of each cell of 4x4 pixels, at the middle of
        the frames that share a latent frame.
        """
        which = self.rng.choice(len(self.scenes), count, p=self.chances)
        scenes = [self.scenes[i] for i in which]
        layout = arrange(scenes, self.rng)
        layouts = list(moments(layout, drift(layout, scenes, self.rng)))
        labelled = [layouts[0], *layouts[1 + EVERY // 2 :: EVERY]]
        return (
            np.stack([draw(moment) for moment in layouts], 1),
            which,
            np.stack([cells(moment, 4) for moment in labelled], 1),
        )
