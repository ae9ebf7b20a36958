"""The reward service: scorers over one batch of pictures."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from actors.messages import Scores
from rewards.cache import ScoreCache
from rewards.combine import WeightedScorer


class RewardActor:
    """Holds the scorers of one service: those that share ``reward``, or the one of
    ``scorers.<label>``.

    A scorer that fails marks its samples NaN and says why; the others' scores stand.
    """

    def __init__(self, config: dict[str, Any], kind: str = "reward"):
        from actors.runtime import begin  # brings torch; the rest of this module is light

        run, _, device = begin(config, kind)
        self._scorer = WeightedScorer.from_config(run.rewards, run.scorers_of(kind), str(device))
        self._cache = ScoreCache(self._scorer)

    def ready(self) -> dict[str, Any]:
        """Who this is; answers once the scorers are loaded."""
        from actors.runtime import identity

        return identity(scorers=list(self._scorer.scorers))

    def score(
        self,
        images: np.ndarray,
        prompts: list[str],
        metadata: list[dict[str, Any]],
        labels: tuple[str, ...] | None = None,
        cached: bool = False,
    ) -> Scores:
        """Raw scores of images uint8 [B, 3, H, W]; ``prompts`` and ``metadata`` have one entry per
        image.

        ``labels``: only these scorers. ``cached``: what was scored here before for the same prompt
        is not scored again.
        """
        start = time.perf_counter()
        made = (self._cache if cached else self._scorer).attempt(images, prompts, metadata, labels)
        return Scores(
            made.scores, made.failures, made.parts, time.perf_counter() - start, made.work
        )
