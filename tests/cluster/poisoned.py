"""Actors that die of one task, in a module with few other imports for their processes."""

import os
import signal
from typing import Any

from actors.encoder import EncoderActor
from actors.messages import ChunkKey, ExploreChunk
from actors.rollout import RolloutActor


class PoisonedRollout(RolloutActor):
    """A rollout actor that dies of one chunk."""

    def explore(self, request: ExploreChunk, conditioning: Any) -> Any:
        if request.key == ChunkKey(0, 1, 2, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().explore(request, conditioning)


class PoisonedEncoder(EncoderActor):
    """An encoder that dies of the prompts of an iteration.

    These are two groups of one; evaluations and the identity check have other groups.
    """

    def encode(self, groups: Any) -> Any:
        if len(groups) == 2 and all(len(prompts) == 1 for prompts in groups):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(groups)
