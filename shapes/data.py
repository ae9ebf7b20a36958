"""Training images: random scenes of the train split, rendered on demand."""

from __future__ import annotations

import numpy as np

from shapes.grammar import Scene, scenes_of
from shapes.render import arrange, cells, draw

KIND_WEIGHTS = {"one": 0.10, "two": 0.27, "relation": 0.38, "count": 0.25}


class Pool:
    """Random scenes of the train split and their images, from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.scenes: list[Scene] = []
        chances: list[float] = []
        for kind, weight in KIND_WEIGHTS.items():
            of_kind = scenes_of("train", kind)
            self.scenes += of_kind
            chances += [weight / len(of_kind)] * len(of_kind)
        self.chances = np.array(chances) / np.sum(chances)

    def images(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (uint8 [count, 3, 32, 32], int [count] indices into ``scenes``)."""
        return self.labelled(count)[:2]

    def labelled(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return images, scene indices, and labels of what each cell of 4x4 pixels shows.

        Labels are int64 [count, 8, 8], see ``render.cells``.
        """
        which = self.rng.choice(len(self.scenes), count, p=self.chances)
        layout = arrange([self.scenes[i] for i in which], self.rng)
        return draw(layout), which, cells(layout, 4)
