"""How long replicas of the learner wait for each other after the optimizer's steps."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from configs.services import Share
from learner.dealing import Dealing


def owners(prompts: int, samples: int, replicas: int, share: Share) -> np.ndarray:
    """The replica, int [prompts x samples], of each sample, as ``actors.sharing`` shares them."""
    total = prompts * samples
    if share == "prompts":
        return np.repeat(np.arange(prompts) % replicas, samples)
    return np.repeat(np.arange(replicas), np.diff(np.arange(replicas + 1) * total // replicas))


@dataclass(frozen=True)
class Waiting:
    """Of updates with ``samples`` of each prompt, dealt to the optimizer's steps."""

    samples: int = 0
    dealing: Dealing = Dealing()

    def longer(self, prompts: int, replicas: int, share: Share) -> float:
        """How many times longer an update lasts than its busiest replica computes."""
        if self.dealing.steps == 1 or replicas == 1:
            return 1.0
        return _longer(self, prompts, replicas, share)


@functools.lru_cache(maxsize=1024)
def _longer(waiting: Waiting, prompts: int, replicas: int, share: Share) -> float:
    return waiting.dealing.waiting(owners(prompts, waiting.samples, replicas, share))


NOBODY = Waiting()
"""There is one step, after which the iteration's update ends for all."""
