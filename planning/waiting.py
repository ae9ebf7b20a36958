"""Time that learner replicas spend waiting for each other after each optimizer step."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from configs.services import Share
from learner.step_assignment import StepAssignment


def owners(prompts: int, samples: int, replicas: int, share: Share) -> np.ndarray:
    """Return the replica of each sample, int [prompts x samples], as in ``actors.sharing``."""
    total = prompts * samples
    if share == "prompts":
        return np.repeat(np.arange(prompts) % replicas, samples)
    return np.repeat(np.arange(replicas), np.diff(np.arange(replicas + 1) * total // replicas))


@dataclass(frozen=True)
class Waiting:
    """Waiting in updates with ``samples`` per prompt, dealt to optimizer steps by ``dealing``."""

    samples: int = 0
    dealing: StepAssignment = StepAssignment()

    def longer(self, prompts: int, replicas: int, share: Share) -> float:
        """Return the duration of an update relative to the computation of its busiest replica."""
        if self.dealing.steps == 1 or replicas == 1:
            return 1.0
        return _longer(self, prompts, replicas, share)


@functools.lru_cache(maxsize=1024)
def _longer(waiting: Waiting, prompts: int, replicas: int, share: Share) -> float:
    return waiting.dealing.slowdown(owners(prompts, waiting.samples, replicas, share))


NOBODY = Waiting()
"""No waiting: there is one optimizer step, after which the update ends for all replicas."""
