"""The adapter that is trained: its weights and AdamW over them, saved and restored bit by bit."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from configs.training import Optimizer
from learner.nonfinite import NonFiniteTraining, first_nonfinite
from policy.experts import experts_of
from policy.lora import trainable


class NothingLearned(RuntimeError):
    """An update that left everything as it was. The message says what stood still."""


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
        """The gradients that there are, by parameter name."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def forget_gradients(self) -> None:
        """Drop all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def _by_expert(self, transformer: nn.Module) -> list[list[str]]:
        """Parameter names of each of its transformers."""
        found = (
            {id(parameter) for parameter in expert.parameters()}
            for expert in experts_of(transformer)
        )
        return [[name for name, p in self.parameters.items() if id(p) in ids] for ids in found]

    def complete(self, total: int) -> None:
        """Every parameter has a gradient, of ``total`` points. It is zero where there are none, and
        of an expert that was not asked, as none of them is at its noise levels.
        """
        gradients = self.gradients()
        asked = [names for names in self._experts if any(name in gradients for name in names)]
        for names in asked or (self._experts if total else ()):
            if idle := next((name for name in names if name not in gradients), None):
                raise RuntimeError(
                    f"{idle!r} got no gradient: the model did not use this adapter in its forward"
                    " pass"
                )
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def step(self) -> float:
        """One step along the gradients, clipped; their norm before that. Raises NonFiniteTraining.

        Weights that are not finite are left as they are: the caller restores what was.
        """
        gradients = self.gradients()
        # apart from clipping: by a norm that is not finite it would spoil every gradient, and
        # nobody could say any more which one was wrong
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

    def require_change(self, before: dict[str, Tensor], norm: float, learning_rate: float) -> None:
        """Raises NothingLearned where all weights are those of ``before``, a ``state()``, although
        the last gradient had this ``norm``: it would go on so, and nothing else would fail.
        """
        same = (
            torch.equal(parameter.detach().cpu(), before[f"weight/{name}"])
            for name, parameter in self.parameters.items()
        )
        if learning_rate and all(same):
            raise NothingLearned(
                f"the optimizer changed no weight although the gradient's norm is {norm:.3g}:"
                f" at optimizer.lr = {learning_rate:g} a step is lost in rounding, or was skipped;"
                " raise it"
            )

    def state(self) -> dict[str, Tensor]:
        """On the CPU: "weight/NAME" and of the optimizer "exp_avg/", "exp_avg_sq/", "step/NAME"."""
        tensors = {f"weight/{name}": parameter for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            tensors |= {
                f"{key}/{name}": value
                for key, value in self.optimizer.state.get(parameter, {}).items()
            }
        # a copy on a CPU too, where the weights themselves would go on being trained
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore ``state()`` bit by bit; parameters that it has no moments of start afresh."""
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
                # AdamW counts steps on the CPU, wherever the parameters are
                kind: value.clone() if kind == "step" else value.to(parameter.device, copy=True)
                for kind, value in values.items()
            }
