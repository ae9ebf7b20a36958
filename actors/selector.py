"""The selector service: which seeds of a prompt to train on, as soon as all of them are scored.

It sorts a hundred numbers, so nothing here may import torch: the process starts in a fraction of
the time, with a fraction of the memory.
"""

from __future__ import annotations

import numpy as np

from actors.messages import ActorInfo, Chosen, Floats
from actors.runtime import begin, identity
from configs.section import Tree
from learner.selection import select
from policy.sampling.noise import stream_seed


class SelectorActor:
    """A pure function behind an actor: same rewards, same choice."""

    def __init__(self, tree: Tree):
        self._run = begin(tree)

    def ready(self) -> ActorInfo:
        """Says who it is."""
        return identity()

    def select(self, iteration: int, prompt: int, rewards: Floats) -> Chosen:
        """Indices to train on and to audit, from a prompt's combined proxy rewards float32 [N].

        A seed with a reward of NaN is dropped. The seeds to audit are drawn from all others, the
        selected ones included: without the best and the worst, rankings would look worse than they
        are.
        """
        rule = self._run.selection
        scored = np.flatnonzero(np.isfinite(rewards))
        seed = stream_seed(self._run.seed, "selection", iteration, prompt)
        train = select(rewards[scored], rule.keep, rule.rule, seed, candidates=scored).indices
        draw = np.random.default_rng(stream_seed(self._run.seed, "audit", iteration, prompt))
        count = min(self._run.audit.random_seeds, len(scored))
        audit = tuple(int(i) for i in sorted(draw.choice(scored, count, replace=False)))
        return Chosen(train, audit)
