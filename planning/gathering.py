"""Seconds in which learner replicas gather a sharded base model (``policy.sharding``).

A forward pass gathers all weights of the base, a backward pass gathers them once more; each of n
replicas receives the n - 1 shards that it does not hold. No overlap of gathering with computation
is assumed. Adapters are not sharded: their gradients are all-reduced
(``planning.durations.Summing``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Gathering:
    """Time to gather the base once, and how often each kind of call gathers it.

    ``near_s`` and ``far_s`` are the seconds in which a link carries the whole base, between GPUs of
    one node (which has ``node`` GPUs) and between nodes. The base is gathered ``generate`` times
    per batch of ``batch`` images, ``train`` times per sample of an update, and ``publish`` times
    per published version. A prompt has ``images`` to generate and ``samples`` to train on.
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
        """Return the seconds of one gather by ``replicas`` replicas, on one node if they fit."""
        whole = self.near_s if replicas <= self.node else self.far_s
        return whole * (replicas - 1) / replicas

    def generating(self, images: float, replicas: int) -> float:
        """Return the seconds of gathering in a task that generates ``images`` images."""
        return math.ceil(images / self.batch) * self.generate * self.once(replicas)

    def training(self, samples: float, replicas: int) -> float:
        """Return the seconds of gathering while a replica trains on ``samples`` samples."""
        return samples * self.train * self.once(replicas)

    def of_prompt(self, replicas: int, part: float) -> tuple[float, float]:
        """Return one replica's seconds for a prompt: (to regenerate it, to train on it).

        ``part`` is the share of the prompt's images that is regenerated per task.
        """
        regenerating = self.generating(self.images * part, replicas) / part if self.images else 0.0
        return regenerating, self.training(self.samples, replicas)

    def publishing(self, replicas: int) -> float:
        """Return the seconds of gathering to publish a version."""
        return self.publish * self.once(replicas)


NOTHING = Gathering()
"""The base is not sharded: every replica holds all of it."""
