"""Replicas that hold a share of the base each: every pass through the denoiser takes all of them.

So all make the same number of passes, in the same order. How many each has to make differs: prompts
have different numbers of samples, and a replica may have nothing to generate. Those that have fewer
go through the denoiser for the others, and what comes of it is dropped.
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
    """Replicas that should go through the denoiser together were asked for different things."""


@contextmanager
def collective(replicas: Replicas, doing: str) -> Iterator[None]:
    """Raises GroupBroken for a replica that is lost within the block."""
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
    """Whether torch.distributed raised it: gloo has no class of its own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


class Passes:
    """Generating in lock step, without gradients."""

    def __init__(self, family: Family, transformer: nn.Module, device: torch.device) -> None:
        self.family, self.transformer, self.device = family, transformer, device

    @contextmanager
    def together(self, replicas: Replicas, what: str, own: int) -> Iterator[None]:
        """Within the block this replica makes ``own`` passes, and as many as the busiest one when
        it ends. ``what`` must be the same on all: which weights they go through. Raises OutOfStep,
        GroupBroken.
        """
        told = replicas.exchange([what, own])
        if len({name for name, _ in told}) > 1:
            names = ", ".join(name for name, _ in told)
            raise OutOfStep(f"replicas were asked to go through different weights: {names}")
        made: list[object] = []
        # counted on the denoiser itself: a solver may take more passes than steps
        hook = self.transformer.register_forward_hook(lambda *_: made.append(None))
        try:
            with collective(replicas, "generating"):
                yield
                if len(made) != own:
                    raise OutOfStep(f"{len(made)} passes were made, {own} were announced")
                for _ in range(max(count for _, count in told) - own):
                    self._one()
        finally:
            hook.remove()

    @torch.no_grad()
    def _one(self) -> None:
        """A pass of one image; nobody looks at it."""
        dtype = next(self.transformer.parameters()).dtype
        cond = conditioning_like(self.family, 1, dtype, self.device)
        # one image, whatever the batches of the others: what blocks gather does not depend on it
        x = torch.zeros(1, *self.family.latent_shape, device=self.device)
        self.family.velocity(self.transformer, x, torch.tensor(0.5, device=self.device), cond)


class LockstepUpdater(Updater):
    """An updater that goes through as many micro-batches on every replica."""

    def _gradients(
        self, samples: TrainingSamples, part: np.ndarray, sigmas: Tensor, sums: dict[str, float]
    ) -> int:
        batches, _ = self.replicas.together(
            lambda: list(self._micro_batches(samples, part, sigmas))
        )
        error: NonFiniteTraining | None = None
        with collective(self.replicas, "training"):
            idle = self._any_points(samples, sigmas)
            most = max(self.replicas.exchange(len(batches)))
            total, bad = self._turns(samples, batches, most, idle, sums)
            # a diagnosis takes passes too, so all make one where any has to
            if any(self.replicas.exchange(bad is not None)):
                found = self._diagnose(samples, *(bad or (idle, "")))
                error = found if bad else None

        def outcome() -> int:
            if error is not None:
                raise error
            self.trained.complete(total)
            return total

        _, counts = self.replicas.together(outcome)
        return sum(int(count or 0) for count in counts)

    def _turns(
        self,
        samples: TrainingSamples,
        batches: list[Points],
        most: int,
        idle: Points,
        sums: dict[str, float],
    ) -> tuple[int, tuple[Points, str] | None]:
        """(points learned from, the first with a loss that is not finite and what it is) of
        ``most`` turns: those without a batch of their own, and those after such a loss, are idle.
        """
        total, bad = 0, None
        for turn in range(most):
            mine = turn < len(batches) and bad is None
            points = batches[turn] if mine else idle
            with nullcontext() if mine else self._dropped():
                loss, metrics = self._forward(samples, points)
                # idle or not: in the backward pass, too, every block gathers its weights
                (loss * len(points)).backward()
            if mine and not bool(torch.isfinite(loss)):
                bad = (points, f"the loss is {loss.item()}")
            elif mine:
                total += len(points)
                for name, value in metrics.items():
                    sums[name] += value.item() * len(points)
        return total, bad

    def _any_points(self, samples: TrainingSamples, sigmas: Tensor) -> Points:
        """A point of this replica's first sample."""
        rng = np.random.Generator(np.random.Philox(key=samples.seeds[0]))
        first = {name: rows[:1] for name, rows in samples.data.items()}
        points = self.objective.points(first, sigmas, rng).of_samples(0)
        return points.rows(slice(0, 1)).to(self.device)

    @contextmanager
    def _dropped(self) -> Iterator[None]:
        """Gradients of the block are let go of; those from before stay."""
        kept = [parameter.grad for parameter in self.trained.parameters.values()]
        # which sets them to None, and writes nothing into the tensors that are kept
        self.trained.forget_gradients()
        yield
        for parameter, gradient in zip(self.trained.parameters.values(), kept, strict=True):
            parameter.grad = gradient

    def _first_modules(
        self, samples: TrainingSamples, points: Points
    ) -> list[tuple[str, str | None]]:
        """All: a replica that has found what is wrong still goes through the others' passes."""
        return list(super()._first_modules(samples, points))
