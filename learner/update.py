"""The update of one iteration: micro-batches, accumulated gradients, AdamW. Generic over objectives
and families.
"""

from __future__ import annotations

import copyreg
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from configs.sections import Optimizer
from learner.objectives.base import Objective, Points
from learner.replicas import ReplicaFailed, Replicas
from policy.families.base import Family
from policy.lora import trainable, use
from policy.types import Conditioning

Value = TypeVar("Value")


class NonFiniteTraining(RuntimeError):
    """A NaN or an infinity in an update. ``what`` it was, the ``module`` it was first seen in,
    where the data were ``saved``.
    """

    def __init__(self, what: str, module: str | None = None, saved: str = "") -> None:
        self.what, self.module, self.saved = what, module, saved
        where = f" in module {module!r}" if module else ""
        super().__init__(f"{what}{where}; {saved or 'nothing was changed'}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Exceptions cross processes by their arguments, and these are not the constructor's."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Samples:
    """What one iteration trains on: S samples of G prompts."""

    data: dict[
        str, Tensor
    ]  # named tensors [S, ...] on the CPU, as in learner.objectives.base.Record
    advantages: Tensor  # float32 [S]
    cond: Conditioning  # G rows
    group: Tensor  # int64 [S], row of cond
    seeds: tuple[int, ...]  # [S], seed of the sample's training times and eps
    places: (
        np.ndarray
    )  # int [S] ascending, of each among all samples of the iteration, those of other replicas too
    total: int  # samples of the iteration

    def __len__(self) -> int:
        return len(self.advantages)

    def at(self, places: np.ndarray) -> np.ndarray:
        """Which of these samples, ascending, stand at one of ``places``."""
        return np.flatnonzero(np.isin(self.places, places))


class Updater:
    """Holds the optimiser of the "current" adapter of a transformer. Nothing but that adapter is
    ever changed.
    """

    def __init__(
        self,
        family: Family,
        transformer: nn.Module,
        objective: Objective,
        settings: Optimizer,
        device: torch.device,
    ) -> None:
        self.family, self.transformer, self.objective = family, transformer, objective
        self.settings, self.device = settings, device
        self.replicas = Replicas()
        self.parameters: dict[str, nn.Parameter] = dict(trainable(transformer))
        self._alike: frozenset[str] = frozenset()
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    def run(
        self, samples: Samples, sigmas: Tensor, learning_rate: float, shuffle_seed: int
    ) -> dict[str, float]:
        """``steps_per_iteration`` optimiser steps over the samples; metrics are means over all
        training points.

        With more than one step the samples are dealt to the steps at random. All or nothing: on any
        exception the weights and the optimiser are as before. Among replicas the steps are dealt
        the samples of all, and each replica computes on its own. Raises NonFiniteTraining,
        ReplicaFailed, GroupBroken.
        """
        order = np.arange(samples.total)
        steps = min(self.settings.steps_per_iteration, samples.total)
        if steps > 1:
            order = np.random.Generator(np.random.Philox(key=shuffle_seed)).permutation(order)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        before = self.state()
        sums: defaultdict[str, float] = defaultdict(float)
        points, norms = 0, []
        self._alike = self._like_current()
        try:
            for part in np.array_split(order, steps):
                count, norm = self._step(samples, samples.at(part), sigmas, sums)
                self._alike = frozenset()
                points += count
                norms.append(norm)
            told = self.replicas.exchange(sums)
        except BaseException:
            self.load_state(before)
            raise
        finally:
            self._alike = frozenset()
            self.optimizer.zero_grad(set_to_none=True)
        names = dict.fromkeys(name for each in told for name in each)
        return {name: sum(each.get(name, 0.0) for each in told) / points for name in names} | {
            "grad_norm": float(np.mean(norms)),
            "optimizer/learning_rate": learning_rate,
            "optimizer/points": float(points),
        }

    def _step(
        self, samples: Samples, part: np.ndarray, sigmas: Tensor, sums: dict[str, float]
    ) -> tuple[int, float]:
        """One optimiser step on the mean loss over the points of ``part`` and of the other
        replicas' parts.

        Returns (points of all, gradient norm before clipping). What is added over the replicas are
        sums over points, divided by the points of all: a mean over points, however unequal the
        parts.
        """
        self.optimizer.zero_grad(set_to_none=True)
        _, counts = self.together(lambda: self._accumulate(samples, part, sigmas, sums))
        total = sum(counts)
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        self.replicas.add(list(gradients.values()))
        for gradient in gradients.values():
            gradient.div_(total)
        norm = torch.nn.utils.get_total_norm(gradients.values())
        if not bool(torch.isfinite(norm)):
            self._require_finite("gradient", gradients, norm.item())
        torch.nn.utils.clip_grads_with_norm_(
            self.parameters.values(), self.settings.max_grad_norm, norm
        )
        self.optimizer.step()
        self._require_finite("weight after the step", self.parameters)
        return total, norm.item()

    def _accumulate(
        self, samples: Samples, part: np.ndarray, sigmas: Tensor, sums: dict[str, float]
    ) -> int:
        """Leave the gradient of the sum of losses over the points of ``part``, add to the metrics'
        ``sums``; how many points.
        """
        total = 0
        for points in self._micro_batches(samples, part, sigmas):
            loss, metrics = self._forward(samples, points)
            if not bool(torch.isfinite(loss)):
                raise self._diagnose(samples, points, f"the loss is {loss.item()}")
            (loss * len(points)).backward()
            total += len(points)
            for name, value in metrics.items():
                sums[name] += value.item() * len(points)
        for name, parameter in self.parameters.items():
            if parameter.grad is None and total:
                raise RuntimeError(
                    f"{name!r} got no gradient: the model did not use this adapter in its forward"
                    " pass"
                )
            if parameter.grad is None:  # this replica has no sample in this step
                parameter.grad = torch.zeros_like(parameter)
        return total

    def together(self, work: Callable[[], Value]) -> tuple[Value, list[Any]]:
        """(what ``work`` returns here; what it returns on every replica, None where that is no
        number).

        Where it raises on one replica it raises on all, so that none waits for another in vain:
        there the error itself, elsewhere NonFiniteTraining again or ReplicaFailed, which name the
        replica.
        """
        error: Exception | None = None
        mine: list[Value] = []
        word: dict[str, Any] = {}
        try:
            mine = [work()]
            word = {"value": mine[0] if isinstance(mine[0], int | float) else None}
        except NonFiniteTraining as found:
            error, word = found, {"what": found.what, "module": found.module}
        except Exception as found:
            error, word = found, {"error": f"{type(found).__name__}: {found}"}
        words = self.replicas.exchange(word)
        if error is not None:
            raise error
        for rank, other in enumerate(words):
            if "what" in other:
                raise NonFiniteTraining(f"{other['what']} (replica {rank})", other["module"])
            if "error" in other:
                raise ReplicaFailed(f"replica {rank} of the learner failed: {other['error']}")
        return mine[0], [other["value"] for other in words]

    def _micro_batches(
        self, samples: Samples, part: np.ndarray, sigmas: Tensor
    ) -> Iterator[Points]:
        """Points of the samples ``part`` in batches of ``batch_size``, whatever sample boundaries;
        the last may be smaller.

        Each sample's points come from a seed of its own: how they are batched changes nothing about
        them.
        """
        size = self.settings.batch_size
        waiting: list[Points] = []
        for index in part.tolist():
            rng = np.random.Generator(np.random.Philox(key=samples.seeds[index]))
            made = self.objective.points(
                {name: rows[index : index + 1] for name, rows in samples.data.items()}, sigmas, rng
            )
            waiting.append(made.of_samples(index))
            if sum(map(len, waiting)) >= size:
                joined = Points.cat(waiting)
                whole = len(joined) - len(joined) % size
                for start in range(0, whole, size):
                    yield joined.rows(slice(start, start + size)).to(self.device)
                waiting = [joined.rows(slice(whole, None))] if whole < len(joined) else []
        if waiting:
            yield Points.cat(waiting).to(self.device)

    def _like_current(self) -> frozenset[str]:
        """Adapters whose weights are those of "current" bit by bit: until a step is taken, so are
        their velocities.
        """
        others = set(self.objective.policies) - {"current", "ref"}
        return frozenset(
            other
            for other in others
            if all(
                torch.equal(self.parameters[name], p)
                for name, p in trainable(self.transformer, other)
            )
        )

    def _forward(self, samples: Samples, points: Points) -> tuple[Tensor, dict[str, Tensor]]:
        """Velocities of every policy the objective wants, with gradient for "current" alone, and
        the loss.

        A policy that still has the current weights gets the current velocities themselves: it saves
        a pass, and the ratio of their log-probabilities is 1 to the last bit whatever kernels are
        chosen with and without gradient.
        """
        cond, velocities = self._conditioning(samples, points), {}
        for policy in sorted(
            set(self.objective.policies) - self._alike, key=lambda name: (name == "current", name)
        ):
            with torch.set_grad_enabled(policy == "current"):
                velocities[policy] = self._velocity(points, cond, policy)
        velocities |= {policy: velocities["current"].detach() for policy in self._alike}
        return self.objective.loss(
            points, velocities, samples.advantages[points.sample_index.cpu()].to(self.device)
        )

    def _conditioning(self, samples: Samples, points: Points) -> Conditioning:
        """A row per point."""
        return samples.cond.rows(samples.group[points.sample_index.cpu()]).to(self.device)

    def _velocity(self, points: Points, cond: Conditioning, policy: str) -> Tensor:
        with use(self.transformer, None if policy == "ref" else policy):
            return self.family.velocity(self.transformer, points.x_t, points.sigma, cond)

    def _diagnose(self, samples: Samples, points: Points, what: str) -> NonFiniteTraining:
        """Run the batch again, each policy in turn, and name the first module whose output is not
        finite.
        """
        cond = self._conditioning(samples, points)
        for policy in self.objective.policies:
            with torch.no_grad():
                module = first_nonfinite_module(
                    self.transformer, lambda policy=policy: self._velocity(points, cond, policy)
                )
            if module is not None:
                return NonFiniteTraining(
                    f"{what}: not finite with the {policy!r} policy first", module
                )
        return NonFiniteTraining(
            f"{what} although every velocity is finite: it overflowed in the objective"
        )

    def _require_finite(
        self,
        what: str,
        tensors: dict[str, Tensor] | dict[str, nn.Parameter],
        norm: float | None = None,
    ) -> None:
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise NonFiniteTraining(f"a {what} is not finite", name)
        if norm is not None:
            raise NonFiniteTraining(
                f"the norm of the gradient is {norm} although each {what} is finite: it overflowed"
            )

    def state(self) -> dict[str, Tensor]:
        """Weights and optimiser moments, copied to the CPU: "weight/NAME", "exp_avg/NAME",
        "exp_avg_sq/NAME", "step/NAME".
        """
        tensors = {f"weight/{name}": parameter for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            tensors |= {
                f"{key}/{name}": value
                for key, value in self.optimizer.state.get(parameter, {}).items()
            }
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
                kind: value.clone() if kind == "step" else value.to(parameter.device, copy=True)
                for kind, value in values.items()
            }


def first_nonfinite_module(model: nn.Module, forward: Callable[[], object]) -> str | None:
    """Name of the first leaf module, in order of execution, whose output holds a NaN or an infinity
    during ``forward``.
    """
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            tensors = (
                [output]
                if isinstance(output, Tensor)
                else output
                if isinstance(output, tuple | list)
                else []
            )
            if not found and any(
                isinstance(t, Tensor) and not bool(torch.isfinite(t).all()) for t in tensors
            ):
                found.append(name)

        return hook

    leaves = [
        (name, module) for name, module in model.named_modules() if not any(module.children())
    ]
    handles = [module.register_forward_hook(watch(name)) for name, module in leaves]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
