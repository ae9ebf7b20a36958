"""The reward actor without torch, so that tests of failures can start and kill many."""

from __future__ import annotations

import os
from typing import Any

from actors.reward import RewardActor
from configs.load import parse
from rewards.cache import ScoreCache
from rewards.combine import WeightedScorer


class LightReward(RewardActor):
    """Scores as ever; threads and device are left as they are."""

    def __init__(self, config: dict[str, Any], kind: str):
        run = parse(config)
        self._scorer = WeightedScorer.from_config(run.rewards, run.scorers_of(kind))
        self._cache = ScoreCache(self._scorer)

    def ready(self) -> dict[str, Any]:
        return {"pid": os.getpid()}
