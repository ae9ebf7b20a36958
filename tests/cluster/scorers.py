"""Scorers that misbehave."""

from collections.abc import Sequence
from typing import Any

import numpy as np


class Broken:
    """Raises, returns NaN, returns too few scores, or fails on the first picture of a batch."""

    def __init__(self, kind: str):
        self.kind = kind

    def __call__(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> np.ndarray:
        scores = images.reshape(len(images), -1).mean(1).astype(np.float32)
        match self.kind:
            case "raises":
                raise RuntimeError("out of paint")
            case "nan":
                return np.full_like(scores, np.nan)
            case "short":
                return scores[:-1]
            case _:
                scores[0] = np.nan
                return scores
