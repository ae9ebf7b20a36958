"""Whose turn on the GPU it is, as an actor knows it: it works in its own turn only."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from actors.messages import Moved
from configs.services import Services

if TYPE_CHECKING:  # the driver only wants the names of methods
    import torch

    from policy.offload import Offload


class Turn:
    """Of an actor in a run where rollout actors and learner take turns; in others it always has
    the GPU. It begins without.
    """

    def __init__(self, who: str, services: Services, device: torch.device) -> None:
        self._who, self._device = who, device
        self._has_it = not services.takes_turns

    def begin(self, offload: Offload | None) -> Moved:
        """The GPU is its own; what had left comes back."""
        start = time.perf_counter()
        moved = offload.back() if offload is not None else 0
        self._has_it = True
        return Moved(moved, time.perf_counter() - start)

    def end(self, offload: Offload | None) -> Moved:
        """The GPU is another's: what is to leave leaves, and memory of passes is given back."""
        from policy.offload import release_cache

        start = time.perf_counter()
        self._has_it = False
        moved = offload.out() if offload is not None else 0
        release_cache(self._device)
        return Moved(moved, time.perf_counter() - start)

    def require(self, what: str) -> None:
        """Raises RuntimeError out of turn: its weights may be elsewhere, and another's in their
        place.
        """
        if not self._has_it:
            raise RuntimeError(
                f"{self._who} is asked to {what} while it is not its turn on the GPU: this should"
                " never happen, please report it"
            )
