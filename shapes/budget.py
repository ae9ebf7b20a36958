"""Training for a wall-clock time that is counted over resumed runs.

Schedules depend on the share of the time that has passed, so every run completes its schedule, on
any machine.
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
    """Resumable iterator over training steps within a time budget.

    ``for done in Budget(...)`` runs one step per iteration; ``done`` is the share of ``minutes``
    that has passed. Training resumes from the state at ``path``. The state is saved there every
    minute and at the end, followed by a call of ``also()``. At most ``most_steps`` steps are done
    over all runs.
    """

    def __init__(
        self,
        path: Path,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        minutes: float,
        on_save: Callable[[], None] = lambda: None,
        most_steps: float = math.inf,
    ) -> None:
        self.path, self.model, self.optimizer, self.also = path, model, optimizer, on_save
        state = load_state(path, model, optimizer)
        self.step, self.spent = int(state.get("step", 0)), float(state.get("spent", 0.0))
        self.first, self.seconds, self.most_steps = self.step, minutes * 60, most_steps

    @property
    def left(self) -> bool:
        """True if another step is to be done."""
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
        """Step number and time spent, for a log line."""
        return f"step {self.step + 1} {self.spent:.0f}s"
