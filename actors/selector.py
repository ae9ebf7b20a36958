"""The selector service: chooses a prompt's seeds to train on when all of them are scored.

It sorts a hundred numbers. Nothing here may import torch, so that the process starts in a fraction
of the time with a fraction of the memory.
"""

from __future__ import annotations

import numpy as np

from actors.messages import ActorInfo, Floats, SelectedSeeds
from actors.runtime import identity, load_config
from configs.section import Tree
from learner.selection import select
from policy.sampling.noise import stream_seed


class SelectorActor:
    """Actor around a pure function: equal rewards give an equal selection."""

    def __init__(self, tree: Tree):
        self._run = load_config(tree)

    def ready(self) -> ActorInfo:
        """Describe the actor."""
        return identity()

    def select(self, iteration: int, prompt: int, rewards: Floats) -> SelectedSeeds:
        """Select indices to train on and to audit by a prompt's combined proxy rewards [N].

        Seeds whose reward is NaN are dropped. The seeds to audit are drawn from all others,
        including the selected ones: without the best and the worst, rank agreement would be
        underestimated.
        """
        rule = self._run.selection
        scored = np.flatnonzero(np.isfinite(rewards))
        seed = stream_seed(self._run.seed, "selection", iteration, prompt)
        train = select(rewards[scored], rule.keep, rule.rule, seed, candidates=scored).indices
        draw = np.random.default_rng(stream_seed(self._run.seed, "audit", iteration, prompt))
        count = min(self._run.audit.random_seeds, len(scored))
        audit = tuple(int(i) for i in sorted(draw.choice(scored, count, replace=False)))
        return SelectedSeeds(train, audit)
