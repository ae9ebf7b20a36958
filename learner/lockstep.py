"""Lockstep passes of replicas with a sharded base: every pass of the denoiser needs all of them.

All replicas must run the same number of passes in the same order. The number that each needs
differs, because prompts have different numbers of samples and a replica may have nothing to
generate. Replicas that need fewer run additional passes, whose results are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from learner.batch import TrainingSamples
from learner.nonfinite import NonFiniteTraining
from learner.objectives.base import Points
from learner.replicas import GroupBroken, Replicas
from learner.update import Updater
from policy.families.base import Family
from policy.pass_cost import conditioning_like
from records.errors import first_line


class OutOfStep(RuntimeError):
    """Replicas that must run passes together got different requests."""


@contextmanager
def collective(replicas: Replicas, doing: str) -> Iterator[None]:
    """Raise GroupBroken if another replica is lost within the context."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, GroupBroken) or not _of_the_group(error):
            raise
        reason = first_line(error)
        raise GroupBroken(
            f"replica {replicas.rank} of {replicas.size} lost the others while {doing}: {reason}"
        ) from None


def _of_the_group(error: RuntimeError) -> bool:
    """Return True if torch.distributed raised ``error``; gloo has no error class of its own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


class Passes:
    """Passes of generating in lockstep, without gradients."""

    def __init__(self, family: Family, transformer: nn.Module, device: torch.device) -> None:
        self.family, self.transformer, self.device = family, transformer, device

    @contextmanager
    def together(self, replicas: Replicas, what: str, own: int) -> Iterator[None]:
        """Run ``own`` passes within the context, then as many as the busiest replica is ahead.

        ``what``, the active weights, must be equal on all replicas. Raises OutOfStep, GroupBroken.
        """
        requests = replicas.all_gather([what, own])
        if len({name for name, _ in requests}) > 1:
            names = ", ".join(name for name, _ in requests)
            raise OutOfStep(f"replicas got calls for different weights: {names}")
        calls: list[object] = []
        # counted on the denoiser itself, as a solver may need more passes than steps
        hook = self.transformer.register_forward_hook(lambda *_: calls.append(None))
        try:
            with collective(replicas, "generating"):
                yield
                if len(calls) != own:
                    raise OutOfStep(f"{len(calls)} passes were made, but {own} were announced")
                for _ in range(max(count for _, count in requests) - own):
                    self._one()
        finally:
            hook.remove()

    @torch.no_grad()
    def _one(self) -> None:
        """Run a pass of one image and drop its result."""
        dtype = next(self.transformer.parameters()).dtype
        cond = conditioning_like(self.family, 1, dtype, self.device)
        # one image, whatever the batch sizes of others: gathered weights do not depend on it
        x = torch.zeros(1, *self.family.latent_shape, device=self.device)
        self.family.velocity(self.transformer, x, torch.tensor(0.5, device=self.device), cond)


class LockstepUpdater(Updater):
    """An updater that runs the same number of micro-batches on every replica."""

    def _gradients(
        self, samples: TrainingSamples, part: np.ndarray, sigmas: Tensor, sums: dict[str, float]
    ) -> int:
        batches, _ = self.replicas.run_on_all(
            lambda: list(self._micro_batches(samples, part, sigmas))
        )
        error: NonFiniteTraining | None = None
        with collective(self.replicas, "training"):
            idle = self._any_points(samples, sigmas)
            most = max(self.replicas.all_gather(len(batches)))
            total, bad = self._turns(samples, batches, most, idle, sums)
            # a diagnosis needs passes too, so all replicas run one if any has to
            if any(self.replicas.all_gather(bad is not None)):
                diagnosis = self._diagnose(samples, *(bad or (idle, "")))
                error = diagnosis if bad else None

        def outcome() -> int:
            if error is not None:
                raise error
            self.trained.fill_missing_gradients(total)
            return total

        _, counts = self.replicas.run_on_all(outcome)
        return sum(int(count or 0) for count in counts)

    def _turns(
        self,
        samples: TrainingSamples,
        batches: list[Points],
        most: int,
        idle: Points,
        sums: dict[str, float],
    ) -> tuple[int, tuple[Points, str] | None]:
        """Run ``most`` micro-batches; return (number of points, first batch with a bad loss).

        Turns without a batch of this replica, and those after a loss that is not finite, use the
        point ``idle`` and drop its gradients.
        """
        total, bad = 0, None
        for turn in range(most):
            mine = turn < len(batches) and bad is None
            points = batches[turn] if mine else idle
            with nullcontext() if mine else self._dropped():
                loss, metrics = self._forward(samples, points)
                # always, because blocks gather their weights in the backward pass too
                (loss * len(points)).backward()
            if mine and not bool(torch.isfinite(loss)):
                bad = (points, f"the loss is {loss.item()}")
            elif mine:
                total += len(points)
                for name, value in metrics.items():
                    sums[name] += value.item() * len(points)
        return total, bad

    def _any_points(self, samples: TrainingSamples, sigmas: Tensor) -> Points:
        """Return one point of this replica's first sample."""
        rng = np.random.Generator(np.random.Philox(key=samples.seeds[0]))
        first = {name: rows[:1] for name, rows in samples.data.items()}
        points = self.objective.points(first, sigmas, rng).of_samples(0)
        return points.rows(slice(0, 1)).to(self.device)

    @contextmanager
    def _dropped(self) -> Iterator[None]:
        """Drop the gradients computed within the context, and keep earlier ones."""
        kept = [parameter.grad for parameter in self.trained.parameters.values()]
        # this sets them to None and does not write to the tensors in ``kept``
        self.trained.forget_gradients()
        yield
        for parameter, gradient in zip(self.trained.parameters.values(), kept, strict=True):
            parameter.grad = gradient

    def _first_modules(
        self, samples: TrainingSamples, points: Points
    ) -> list[tuple[str, str | None]]:
        """Run all passes: a replica with a finding must still take part in those of the others."""
        return list(super()._first_modules(samples, points))
