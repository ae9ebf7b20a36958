"""The reward service: every configured scorer over one batch of pictures."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from actors.messages import Scores
from actors.runtime import begin, identity
from rewards import build
from rewards.base import check


class RewardActor:
    """Holds the scorers. A scorer that fails marks its samples NaN and says why; the others' scores stand."""

    def __init__(self, config: dict[str, Any]):
        run, _, _ = begin(config, "reward")
        self._scorers = {scorer.label: build(scorer) for scorer in run.rewards.scorers}

    def ready(self) -> dict[str, Any]:
        """Who this is; answers once the scorers are loaded."""
        return identity(scorers=list(self._scorers))

    def score(self, images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]]) -> Scores:
        """Raw scores of images uint8 [B, 3, H, W]; ``prompts`` and ``metadata`` have one entry per image."""
        start = time.perf_counter()
        values: dict[str, np.ndarray] = {}
        failures: list[str] = []
        for label, scorer in self._scorers.items():
            try:
                scores = np.asarray(scorer(images, prompts, metadata), dtype=np.float32)
            except Exception as error:  # a user's scorer may raise anything; it is counted, retried and reported, never scored
                failures.append(f"{label}: {type(error).__name__}: {error}")
                values[label] = np.full(len(images), np.nan, np.float32)
                continue
            values[label], problem = check(scores, len(images))
            if problem:
                failures.append(f"{label}: {problem}")
        return Scores(values, tuple(failures), time.perf_counter() - start)
