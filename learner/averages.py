"""Adapters that are averages of the trained one: EMA, sampling policy, those of an objective."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from configs.schema import RunConfig
from learner.objectives.base import Objective
from learner.schedules import ema_decay, old_policy_decay
from learner.trained_adapter import NothingLearned
from policy.lora import adapter_parameters, adapter_state, blend, load_adapter_state

PREVIOUS = "previous"
"""The sampling policy before the last update, kept if it is used to explore (``explore_ahead``)."""


def adapters_of(config: RunConfig, objective: Objective) -> tuple[str, ...]:
    """Return the names of all adapters of the learner, the trained one first."""
    names = {objective.sampling_adapter, *objective.policies, *objective.averages, "ema"}
    if config.explore_ahead:
        names.add(PREVIOUS)
    return ("current", *sorted(names - {"ref", "current"}))


class Averages:
    """Updates the averages of one transformer's trained adapter.

    EMA and averages of the objective are updated after each iteration or after each optimizer step
    (``optimizer.averages``), the sampling policy after each iteration.
    """

    def __init__(self, config: RunConfig, objective: Objective, transformer: nn.Module) -> None:
        self._config, self._objective, self._transformer = config, objective, transformer
        self.by_step = config.optimizer.averages != "iteration"

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Return the weights of the averages that are updated by step, by adapter."""
        names = ("ema", *self._objective.averages)
        return {name: adapter_state(self._transformer, name) for name in names}

    def restore(self, states: dict[str, dict[str, Tensor]]) -> None:
        """Restore what ``states`` has returned."""
        for name, state in states.items():
            load_adapter_state(self._transformer, name, state)

    def after_step(self, done: int, step: int) -> None:
        """Update averages after optimizer step 1, 2, ... of an iteration; ``done`` came before."""
        s = self._steps(done, step)
        blend(self._transformer, "ema", "current", ema_decay(self._config.ema, s))
        for name, decay_after in self._objective.averages.items():
            blend(self._transformer, name, "current", decay_after(s))

    def after_iteration(self, done: int) -> dict[str, float]:
        """Update averages after an iteration, the ``done``-th; return metrics.

        Raises NothingLearned.
        """
        s = self._steps(done, 0) if self.by_step else done
        if not self.by_step:
            self._move("ema", ema_decay(self._config.ema, s), "lower ema.decay")
            for name, decay_after in self._objective.averages.items():
                self._move(name, decay_after(s), "lower its decay in [objective]")
        if "old" not in adapters_of(self._config, self._objective):
            return {}
        decay = old_policy_decay(self._config.resolved_old_policy, s)
        self._move("old", decay, "lower old_policy's decay")
        return {"old_policy/decay": decay}

    def _steps(self, done: int, step: int) -> int:
        """Return s of the decay schedules: all optimizer steps up to ``step`` of an iteration."""
        return done * self._config.optimizer.steps_per_iteration + step

    def _move(self, name: str, decay: float, advice: str) -> None:
        """Move one average towards the trained weights.

        Raises NothingLearned if it does not move although it should: the run would evaluate and
        export the model from before training.
        """
        after, current = (adapter_parameters(self._transformer, part) for part in (name, "current"))
        # compared on the device: copies in host memory would take a second for large adapters
        before = {key: parameter.detach().clone() for key, parameter in after.items()}
        blend(self._transformer, name, "current", decay)
        apart = any(not torch.equal(before[key], current[key]) for key in before)
        if apart and all(torch.equal(before[key], after[key]) for key in before):
            raise NothingLearned(
                f"the average {name!r} did not move although the trained weights differ from it:"
                f" at decay {decay:g} a step is lost to rounding; {advice}"
            )
