"""What a learner whose base is in shards gathers (``policy.sharding``), as seconds of links.

A pass gathers all weights of the base, a backward pass once more; each of n replicas receives the
n - 1 shares that it has not. Nothing of it is taken to be hidden behind computing. Gradients of
adapters, which every replica has whole, are added up as ever: ``planning.durations.Summing``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Gathering:
    """How long the base takes on a link, and how often it is gathered.

    ``near_s`` and ``far_s``: seconds in which a link carries the whole base, between GPUs of a node
    (there are ``node`` of them) and between nodes. The base is gathered ``generate`` times for a
    batch of ``batch`` images, ``train`` times for a sample of an update, and ``publish`` times for
    a version. A prompt has ``images`` to generate and ``samples`` to train on.
    """

    near_s: float = 0.0
    far_s: float = 0.0
    node: int = 8
    batch: int = 1
    generate: int = 0
    train: float = 0.0
    publish: float = 0.0
    images: int = 0
    samples: int = 0

    def once(self, replicas: int) -> float:
        """Seconds until each of so many replicas has the whole base; on one node if they fit."""
        whole = self.near_s if replicas <= self.node else self.far_s
        return whole * (replicas - 1) / replicas

    def generating(self, images: float, replicas: int) -> float:
        """Seconds of gathering in a task that generates so many images."""
        return math.ceil(images / self.batch) * self.generate * self.once(replicas)

    def training(self, samples: float, replicas: int) -> float:
        """Seconds of gathering while a replica trains on so many samples."""
        return samples * self.train * self.once(replicas)

    def of_prompt(self, replicas: int, part: float) -> tuple[float, float]:
        """(to regenerate it, such a ``part`` at a time; to train on it), by one replica."""
        again = self.generating(self.images * part, replicas) / part if self.images else 0.0
        return again, self.training(self.samples, replicas)

    def publishing(self, replicas: int) -> float:
        """Seconds of gathering to publish a version."""
        return self.publish * self.once(replicas)


NOTHING = Gathering()
"""Of a base that is whole on every replica."""
