"""Lockstep execution for replicas that each hold a shard of the base model.

Every forward or backward pass gathers shards from all replicas, so all must make the same number of
passes in the same order. But their work differs: prompts have different numbers of samples, and a
replica may have nothing to generate. Replicas with fewer passes make idle ones, whose results are
dropped.
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
from policy.memory import conditioning_like
from records.errors import first_line


class OutOfStep(RuntimeError):
    """Replicas that must run the denoiser together were called with different requests."""


@contextmanager
def collective(replicas: Replicas, doing: str) -> Iterator[None]:
    """Convert torch.distributed's errors within the block to GroupBroken."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, GroupBroken) or not _is_distributed_error(error):
            raise
        reason = first_line(error)
        raise GroupBroken(
            f"replica {replicas.rank} of {replicas.size} lost the others while {doing}: {reason}"
        ) from None


def _is_distributed_error(error: RuntimeError) -> bool:
    """Return True if torch.distributed raised the error; gloo has no error class of its own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


class Passes:
    """Lockstep forward passes of the denoiser, without gradients, for generating."""

    def __init__(self, family: Family, transformer: nn.Module, device: torch.device) -> None:
        self.family, self.transformer, self.device = family, transformer, device

    @contextmanager
    def together(self, replicas: Replicas, what: str, own: int) -> Iterator[None]:
        """Run a block that makes ``own`` passes, then idle ones up to the busiest replica's count.

        ``what`` names the weights that are used and must be the same on all replicas. Raises
        OutOfStep if it is not or if the block made another number of passes, and GroupBroken.
        """
        requests = replicas.exchange([what, own])
        if len({name for name, _ in requests}) > 1:
            names = ", ".join(name for name, _ in requests)
            raise OutOfStep(f"replicas were asked to go through different weights: {names}")
        made: list[object] = []
        # counted on the denoiser itself: a solver may make more passes than steps
        hook = self.transformer.register_forward_hook(lambda *_: made.append(None))
        try:
            with collective(replicas, "generating"):
                yield
                if len(made) != own:
                    raise OutOfStep(f"{len(made)} passes were made, {own} were announced")
                for _ in range(max(count for _, count in requests) - own):
                    self._idle_pass()
        finally:
            hook.remove()

    @torch.no_grad()
    def _idle_pass(self) -> None:
        """Make a pass of one image and drop its result."""
        dtype = next(self.transformer.parameters()).dtype
        cond = conditioning_like(self.family, 1, dtype, self.device)
        # the shards that blocks gather do not depend on the batch size, so one image is enough
        x = torch.zeros(1, *self.family.latent_shape, device=self.device)
        self.family.velocity(self.transformer, x, torch.tensor(0.5, device=self.device), cond)


class LockstepUpdater(Updater):
    """Updater that makes the same number of passes on every replica."""

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
            total, bad = self._run_batches(samples, batches, most, idle, sums)
            # a diagnosis makes passes too: if one replica needs it, all take part
            if any(self.replicas.exchange(bad is not None)):
                diagnosis = self._diagnose(samples, *(bad or (idle, "")))
                error = diagnosis if bad else None

        def outcome() -> int:
            if error is not None:
                raise error
            self.trained.complete(total)
            return total

        _, counts = self.replicas.together(outcome)
        return sum(int(count or 0) for count in counts)

    def _run_batches(
        self,
        samples: TrainingSamples,
        batches: list[Points],
        most: int,
        idle: Points,
        sums: dict[str, float],
    ) -> tuple[int, tuple[Points, str] | None]:
        """Make ``most`` forward and backward passes over this replica's batches, then ``idle``.

        Returns (number of points learned from, (points, what is wrong) of the first batch whose
        loss is not finite, or None). After such a batch the remaining passes are idle too.
        """
        total, bad = 0, None
        for turn in range(most):
            has_batch = turn < len(batches) and bad is None
            points = batches[turn] if has_batch else idle
            with nullcontext() if has_batch else self._gradients_dropped():
                loss, metrics = self._forward(samples, points)
                # idle passes too: every block also gathers its weights in the backward pass
                (loss * len(points)).backward()
            if has_batch and not bool(torch.isfinite(loss)):
                bad = (points, f"the loss is {loss.item()}")
            elif has_batch:
                total += len(points)
                for name, value in metrics.items():
                    sums[name] += value.item() * len(points)
        return total, bad

    def _any_points(self, samples: TrainingSamples, sigmas: Tensor) -> Points:
        """Return one point of this replica's first sample, for idle passes."""
        rng = np.random.Generator(np.random.Philox(key=samples.seeds[0]))
        first = {name: rows[:1] for name, rows in samples.data.items()}
        points = self.objective.points(first, sigmas, rng).of_samples(0)
        return points.rows(slice(0, 1)).to(self.device)

    @contextmanager
    def _gradients_dropped(self) -> Iterator[None]:
        """Discard the gradients that the block computes, and restore those from before."""
        kept = [parameter.grad for parameter in self.trained.parameters.values()]
        # sets .grad to None and so does not write into the tensors that are kept
        self.trained.forget_gradients()
        yield
        for parameter, gradient in zip(self.trained.parameters.values(), kept, strict=True):
            parameter.grad = gradient

    def _first_modules(
        self, samples: TrainingSamples, points: Points
    ) -> list[tuple[str, str | None]]:
        """Return all policies' results as a list.

        A replica that has found the faulty module must still take part in the others' passes.
        """
        return list(super()._first_modules(samples, points))
