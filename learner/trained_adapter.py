"""The trained adapter: its weights and their AdamW optimizer, saved and restored exactly."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from configs.training import Optimizer
from learner.nonfinite import NonFiniteTraining, first_nonfinite
from policy.experts import experts_of
from policy.lora import trainable


class NothingLearned(RuntimeError):
    """An update changed nothing although it should have. The message says what did not change."""


class TrainedAdapter:
    """The parameters of a transformer's adapter "current", and their optimizer."""

    def __init__(self, transformer: nn.Module, settings: Optimizer) -> None:
        self.parameters: dict[str, nn.Parameter] = dict(trainable(transformer))
        self._experts = self._by_expert(transformer)
        self._max_norm = settings.max_grad_norm
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    def set_rate(self, learning_rate: float) -> None:
        """Use this learning rate from the next step on."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def gradients(self) -> dict[str, Tensor]:
        """Return all existing gradients by parameter name."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def forget_gradients(self) -> None:
        """Drop all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def _by_expert(self, transformer: nn.Module) -> list[list[str]]:
        """Return the parameter names of each transformer."""
        found = (
            {id(parameter) for parameter in expert.parameters()}
            for expert in experts_of(transformer)
        )
        return [[name for name, p in self.parameters.items() if id(p) in ids] for ids in found]

    def fill_missing_gradients(self, total: int) -> None:
        """Give every parameter a gradient after a backward pass over ``total`` points.

        Missing gradients become zero if there are no points, or if none of the points is at the
        noise levels of the parameter's expert. Raises RuntimeError for other missing gradients.
        """
        gradients = self.gradients()
        requested = [names for names in self._experts if any(name in gradients for name in names)]
        for names in requested or (self._experts if total else ()):
            if idle := next((name for name in names if name not in gradients), None):
                raise RuntimeError(
                    f"{idle!r} got no gradient: the model did not use this adapter in its forward"
                    " pass"
                )
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def step(self) -> float:
        """Clip the gradients and take a step; return their norm before clipping.

        Raises NonFiniteTraining. Non-finite weights are not restored; that is up to the caller.
        """
        gradients = self.gradients()
        # separate from clipping, which would multiply every gradient by a non-finite norm, so that
        # the faulty one could not be named any more
        norm = torch.nn.utils.get_total_norm(gradients.values())
        if not bool(torch.isfinite(norm)):
            if (name := first_nonfinite(gradients)) is not None:
                raise NonFiniteTraining("a gradient is not finite", name)
            raise NonFiniteTraining(
                f"the norm of the gradient is {norm.item()} although each gradient is finite: it"
                " overflowed"
            )
        torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self._max_norm, norm)
        self.optimizer.step()
        if (name := first_nonfinite(self.parameters)) is not None:
            raise NonFiniteTraining("a weight after the step is not finite", name)
        return norm.item()

    def changed_since(self, before: dict[str, Tensor]) -> bool:
        """Return True if a weight differs from ``before``, a ``state()``."""
        return not all(
            torch.equal(parameter.detach().cpu(), before[f"weight/{name}"])
            for name, parameter in self.parameters.items()
        )

    def state(self) -> dict[str, Tensor]:
        """Return a copy of weights and optimizer state on the CPU.

        Keys are "weight/NAME", "exp_avg/NAME", "exp_avg_sq/NAME" and "step/NAME".
        """
        tensors = {f"weight/{name}": parameter for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            tensors |= {
                f"{key}/{name}": value
                for key, value in self.optimizer.state.get(parameter, {}).items()
            }
        # on a CPU ``to`` alone would return the weights themselves, which training changes
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore a ``state()`` exactly; parameters without moments in it start without moments."""
        moments: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, tensor in state.items():
            kind, _, name = key.partition("/")
            if kind == "weight":
                self.parameters[name].data.copy_(tensor)
            else:
                moments[name][kind] = tensor
        self.optimizer.state.clear()
        for name, values in moments.items():
            parameter = self.parameters[name]
            self.optimizer.state[parameter] = {
                # AdamW keeps its step counters on the CPU, whatever the parameters' device
                kind: value.clone() if kind == "step" else value.to(parameter.device, copy=True)
                for kind, value in values.items()
            }
