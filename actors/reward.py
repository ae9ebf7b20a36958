"""The reward service: every configured scorer over one batch of pictures."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from actors.messages import Scores
from actors.runtime import begin, identity
from rewards.combine import WeightedScorer


class RewardActor:
    """Holds the scorers. A scorer that fails marks its samples NaN and says why; the others' scores stand."""

    def __init__(self, config: dict[str, Any]):
        run, _, _ = begin(config, "reward")
        self._scorer = WeightedScorer.from_config(run.rewards)

    def ready(self) -> dict[str, Any]:
        """Who this is; answers once the scorers are loaded."""
        return identity(scorers=list(self._scorer.scorers))

    def score(self, images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]]) -> Scores:
        """Raw scores of images uint8 [B, 3, H, W]; ``prompts`` and ``metadata`` have one entry per image."""
        start = time.perf_counter()
        made = self._scorer.attempt(images, prompts, metadata)
        return Scores(made.scores, made.failures, made.parts, time.perf_counter() - start)
