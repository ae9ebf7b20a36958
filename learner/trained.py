"""The trained adapter: its weights and their AdamW optimizer, with bit-identical save/restore."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from configs.training import Optimizer
from learner.nonfinite import NonFiniteTraining, first_nonfinite
from policy.experts import experts_of
from policy.lora import trainable


class NothingLearned(RuntimeError):
    """An update did not change what it should have. The message says what did not change."""


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
        """Return the gradients by parameter name, without parameters that have none."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def forget_gradients(self) -> None:
        """Drop all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def _by_expert(self, transformer: nn.Module) -> list[list[str]]:
        """Return the names of the trained parameters of each expert transformer."""
        members = (
            {id(parameter) for parameter in expert.parameters()}
            for expert in experts_of(transformer)
        )
        return [[name for name, p in self.parameters.items() if id(p) in ids] for ids in members]

    def complete(self, total: int) -> None:
        """Set missing gradients to zero after a backward pass over ``total`` points.

        Gradients are missing if there are no points, and for an expert at whose noise levels no
        point is. Raises RuntimeError if an expert that was used gave a parameter no gradient.
        """
        gradients = self.gradients()
        used = [names for names in self._experts if any(name in gradients for name in names)]
        # with points but without any gradient, all experts count as used, which raises below
        for names in used or (self._experts if total else ()):
            if idle := next((name for name in names if name not in gradients), None):
                raise RuntimeError(
                    f"{idle!r} got no gradient: the model did not use this adapter in its forward"
                    " pass"
                )
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def step(self) -> float:
        """Clip the gradients, make one optimizer step, and return the norm before clipping.

        Raises NonFiniteTraining if a gradient, their norm or a new weight is not finite. New
        weights are not rolled back then: the caller restores the previous ones.
        """
        gradients = self.gradients()
        # separate from clipping, which would multiply every gradient by a norm that is not finite;
        # the gradient at fault could then no longer be identified
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
        """Raise NothingLearned if all weights equal those of ``before``, an earlier ``state()``.

        ``norm`` is that of the last gradient, for the message. Without this check a run that learns
        nothing would continue without any error.
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
        """Return a copy of weights and optimizer state on the CPU.

        Keys are "weight/NAME", and of the optimizer "exp_avg/NAME", "exp_avg_sq/NAME", "step/NAME".
        """
        tensors = {f"weight/{name}": parameter for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            tensors |= {
                f"{key}/{name}": value
                for key, value in self.optimizer.state.get(parameter, {}).items()
            }
        # copied even on a CPU, as the returned tensors would otherwise change with the next step
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore a ``state()`` bit by bit; parameters without moments in it start without any."""
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
                # AdamW keeps its step counts on the CPU, whatever the parameters' device
                kind: value.clone() if kind == "step" else value.to(parameter.device, copy=True)
                for kind, value in values.items()
            }
