"""Training for a wall-clock time that is counted over resumed runs.

What decays does so by the share of the time that has passed, so a run always ends finished, on any
machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from shapes.state import load_state, save_state

SAVE_EVERY = 60.0  # seconds


class Budget:
    """``for done in Budget(...)``: one step each, ``done`` of ``minutes`` gone; goes on where
    ``path`` says that it was, and writes there each minute and at the end, with ``also()``. No more
    than ``most_steps`` in all.
    """

    def __init__(
        self,
        path: Path,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        minutes: float,
        also: Callable[[], None] = lambda: None,
        most_steps: float = math.inf,
    ) -> None:
        self.path, self.model, self.optimizer, self.also = path, model, optimizer, also
        state = load_state(path, model, optimizer)
        self.step, self.spent = int(state.get("step", 0)), float(state.get("spent", 0.0))
        self.first, self.seconds, self.most_steps = self.step, minutes * 60, most_steps

    @property
    def left(self) -> bool:
        """Whether there is another step to do."""
        return self.spent < self.seconds and self.step < self.most_steps

    def __iter__(self) -> Iterator[float]:
        begin, saved = time.monotonic() - self.spent, time.monotonic()
        while self.left:
            yield self.spent / self.seconds
            self.step, self.spent = self.step + 1, time.monotonic() - begin
            if time.monotonic() - saved > SAVE_EVERY or not self.left:
                counters = {"spent": self.spent, "step": self.step}
                save_state(self.path, self.model, self.optimizer, counters)
                self.also()
                saved = time.monotonic()

    @property
    def where(self) -> str:
        """For a line of the log."""
        return f"step {self.step + 1} {self.spent:.0f}s"
