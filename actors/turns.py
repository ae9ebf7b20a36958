"""Turns on a shared GPU, as an actor sees them: it works in its own turn only."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from actors.messages import Moved
from configs.services import Services

if TYPE_CHECKING:  # the driver, which wants the names of methods only, needs no torch
    import torch

    from policy.offload import Offload


class Turn:
    """Whether an actor has the GPU. Where rollout actors and learner take turns it starts without;
    in other runs it always has it.
    """

    def __init__(self, who: str, services: Services, device: torch.device) -> None:
        self._who, self._device = who, device
        self._has_it = not services.takes_turns

    def begin(self, offload: Offload | None) -> Moved:
        """Take the GPU: what was moved to host memory comes back."""
        start = time.perf_counter()
        moved = offload.to_device() if offload is not None else 0
        self._has_it = True
        return Moved(moved, time.perf_counter() - start)

    def end(self, offload: Offload | None) -> Moved:
        """Leave the GPU: move ``offload`` to host memory, and release torch's cached memory."""
        from policy.offload import release_cache

        start = time.perf_counter()
        self._has_it = False
        # after the line above: where this fails half-way, nothing may work on what is left
        moved = offload.to_host() if offload is not None else 0
        release_cache(self._device)
        return Moved(moved, time.perf_counter() - start)

    def require(self, what: str) -> None:
        """Raises RuntimeError out of turn, when the weights may not be on the GPU."""
        if not self._has_it:
            raise RuntimeError(
                f"{self._who} is asked to {what} while it is not its turn on the GPU: this should"
                " never happen, please report it"
            )
