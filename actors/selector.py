"""The selector service: contrastive seeds of a prompt, as soon as its pool is scored."""

from __future__ import annotations

from typing import Any

import numpy as np

from actors.messages import Chosen
from actors.runtime import begin, identity
from learner.selection import select
from policy.sampling.noise import stream_seed


class SelectorActor:
    """A pure function behind an actor: same rewards, same choice."""

    def __init__(self, config: dict[str, Any]):
        self._run, _, _ = begin(config, "selector")

    def ready(self) -> dict[str, Any]:
        """Who this is."""
        return identity()

    def choose(self, iteration: int, prompt: int, rewards: np.ndarray) -> Chosen:
        """Indices to train on and to audit, from a prompt's combined proxy rewards float32 [N]
        (NaN: dropped).

        What is audited is drawn from all: without the best and the worst, rankings would look worse
        than they are.
        """
        rule = self._run.selection
        scored = np.flatnonzero(np.isfinite(rewards))
        seed = stream_seed(self._run.seed, "selection", iteration, prompt)
        train = select(rewards[scored], rule.keep, rule.rule, seed, candidates=scored).indices
        draw = np.random.default_rng(stream_seed(self._run.seed, "audit", iteration, prompt))
        count = min(self._run.audit.random_seeds, len(scored))
        audit = tuple(int(i) for i in sorted(draw.choice(scored, count, replace=False)))
        return Chosen(train, audit)
