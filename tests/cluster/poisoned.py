"""Actors that die of one task, in a module of which their processes import nothing else."""

import os
import signal
from typing import Any

from actors.encoder import EncoderActor
from actors.messages import ChunkKey, ExploreChunk
from actors.rollout import RolloutActor


class PoisonedRollout(RolloutActor):
    """Dies of one chunk."""

    def explore(self, request: ExploreChunk, conditioning: Any) -> Any:
        if request.key == ChunkKey(0, 1, 2, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().explore(request, conditioning)


class PoisonedEncoder(EncoderActor):
    """Dies of the prompts of an iteration: two groups of one, as neither those of an evaluation
    are nor that of the identity check.
    """

    def encode(self, groups: Any) -> Any:
        if len(groups) == 2 and all(len(prompts) == 1 for prompts in groups):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(groups)
