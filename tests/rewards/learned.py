"""Images, prompts and scorers shared by the tests of learned scorers; settings are the fixture
``settings``.
"""

from __future__ import annotations

import numpy as np

from configs.rewards import Scorer as ScorerConfig
from rewards import build

IMAGES = np.random.default_rng(0).integers(0, 256, (7, 3, 40, 56), dtype=np.uint8)
PROMPTS = ["word40 word7", "word1", "word40 word7", "", "word9 " * 60, "word2 word3", "word1"]


def made(settings, name, **more):
    return build(ScorerConfig(name=name, settings=settings[name] | more), device="cpu")
