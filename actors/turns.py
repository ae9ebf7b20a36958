"""Turns on a shared GPU in an actor: weights are on the GPU only during the actor's own turn."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from actors.messages import Moved
from configs.services import Services

if TYPE_CHECKING:  # the driver imports actor classes for their methods' names and needs no torch
    import torch

    from policy.offload import Offload


class Turn:
    """Keeps track of whether an actor has the GPU.

    If rollout actors and learner take turns, an actor starts without the GPU; otherwise it always
    has it.
    """

    def __init__(self, who: str, services: Services, device: torch.device) -> None:
        self._who, self._device = who, device
        self._has_it = not services.takes_turns

    def begin(self, offload: Offload | None) -> Moved:
        """Begin the actor's turn: move ``offload`` from host memory back to the GPU."""
        start = time.perf_counter()
        moved = offload.to_device() if offload is not None else 0
        self._has_it = True
        return Moved(moved, time.perf_counter() - start)

    def end(self, offload: Offload | None) -> Moved:
        """End the turn: move ``offload`` to host memory and release torch's cached memory."""
        from policy.offload import release_cache

        start = time.perf_counter()
        self._has_it = False
        # only after the line above: if this fails half-way, no call may use the remaining weights
        moved = offload.to_host() if offload is not None else 0
        release_cache(self._device)
        return Moved(moved, time.perf_counter() - start)

    def require(self, what: str) -> None:
        """Raise RuntimeError if it is not the actor's turn, so that weights may be missing."""
        if not self._has_it:
            raise RuntimeError(
                f"{self._who} was called to {what} outside its turn on the GPU: this is a bug,"
                " please report it"
            )
