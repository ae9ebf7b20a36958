"""One iteration's update, of any objective and family: micro-batches, gradients, AdamW."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from configs.training import Optimizer
from learner.batch import TrainingSamples
from learner.dealing import Dealing
from learner.nonfinite import NonFiniteTraining, first_nonfinite_module
from learner.objectives.base import Objective, Points
from learner.replicas import Replicas
from learner.trained import NothingLearned, TrainedAdapter
from policy.attention import without_cudnn_attention
from policy.families.base import Family
from policy.lora import trainable, use_adapter
from policy.precision.compiling import compile_failures, compiled
from policy.sampling.guidance import Guided, velocity
from policy.types import Conditioning

COMPILE = "optimizer.compile"


class Updater:
    """Holds the optimizer of a transformer's "current" adapter, and changes nothing but that."""

    def __init__(
        self,
        family: Family,
        transformer: nn.Module,
        objective: Objective,
        settings: Optimizer,
        device: torch.device,
        guided: Guided | None = None,
    ) -> None:
        self.guided = guided
        self.family, self.transformer, self.objective = family, transformer, objective
        self.settings, self.device = settings, device
        self._denoiser = (
            compiled(transformer, device, COMPILE, trains=True) if settings.compile else transformer
        )
        self.replicas = Replicas()
        self.trained = TrainedAdapter(transformer, settings)
        self._alike: frozenset[str] = frozenset()

    def run(
        self,
        samples: TrainingSamples,
        sigmas: Tensor,
        learning_rate: float,
        shuffle_seed: int,
        after_step: Callable[[int], None] | None = None,
    ) -> dict[str, float]:
        """``steps_per_iteration`` optimizer steps; metrics are means over all training points.

        All or nothing: on any exception the weights and the optimizer are as before. The samples of
        all replicas are dealt to the steps (``learner.dealing``), and each replica computes on its
        own. ``after_step`` is called with 1, 2, ... after each. Raises NonFiniteTraining,
        ReplicaFailed, GroupBroken.
        """
        self.trained.set_rate(learning_rate)
        before = self.trained.state()
        sums: defaultdict[str, float] = defaultdict(float)
        points, norms = 0, []
        self._alike = self._like_current()
        try:
            dealt = Dealing.of(self.settings).steps_of(samples.total, shuffle_seed)
            for step in range(int(dealt.max()) + 1):
                part = np.flatnonzero(dealt[samples.places] == step)
                with without_cudnn_attention(self.device):
                    count, norm = self._step(samples, part, sigmas, sums)
                # from the first step on "current" differs from all other adapters
                self._alike = frozenset()
                points += count
                norms.append(norm)
                if after_step is not None:
                    after_step(len(norms))
            # before the check: a replica that raised there would leave the others waiting for its
            # sums
            told = self.replicas.exchange(sums)
            self._require_learned(samples, norms, before, learning_rate)
        except BaseException:
            # an interrupted update would leave weights that no seed leads to again
            self.trained.load_state(before)
            raise
        finally:
            self._alike = frozenset()
            self.trained.forget_gradients()
        names = dict.fromkeys(name for each in told for name in each)
        return {name: sum(each.get(name, 0.0) for each in told) / points for name in names} | {
            "grad_norm": float(np.mean(norms)),
            "optimizer/learning_rate": learning_rate,
            "optimizer/points": float(points),
        }

    def _require_learned(
        self,
        samples: TrainingSamples,
        norms: Sequence[float],
        before: dict[str, Tensor],
        learning_rate: float,
    ) -> None:
        """Raises NothingLearned where steps with gradients of these norms, or of none, left the
        weights at ``before`` although there was something to learn.
        """
        if any(norms):
            self.trained.require_change(before, norms[-1], learning_rate)
        # not among replicas: this one's samples may be alike while others' are not
        elif bool(samples.advantages.any()) and self.replicas.size == 1:
            raise NothingLearned(
                "every gradient is zero although advantages are not: the loss does not depend on"
                " the adapter"
            )

    def gradient(self, samples: TrainingSamples, sigmas: Tensor) -> Tensor:
        """The gradient of the mean loss over all points of ``samples``, flat, float32 [D] on the
        CPU. Nothing is changed. Raises NonFiniteTraining.
        """
        self._alike = self._like_current()
        try:
            self.trained.forget_gradients()
            with without_cudnn_attention(self.device):
                every = np.arange(len(samples))
                count = self._accumulate(samples, every, sigmas, defaultdict(float))
            gradients = [gradient.flatten() for gradient in self.trained.gradients().values()]
            return (torch.cat(gradients) / count).cpu()
        finally:
            self._alike = frozenset()
            self.trained.forget_gradients()

    def _step(
        self, samples: TrainingSamples, part: np.ndarray, sigmas: Tensor, sums: dict[str, float]
    ) -> tuple[int, float]:
        """One optimizer step on the mean loss over the points of ``part``, of all replicas.

        Returns (points of all, gradient norm before clipping). What is added over the replicas are
        sums over points, divided by the points of all: a mean over points, however unequal the
        parts.
        """
        self.trained.forget_gradients()
        total = self._gradients(samples, part, sigmas, sums)
        gradients = list(self.trained.gradients().values())
        self.replicas.add(gradients)
        for gradient in gradients:
            gradient.div_(total)
        return total, self.trained.step()

    def _gradients(
        self, samples: TrainingSamples, part: np.ndarray, sigmas: Tensor, sums: dict[str, float]
    ) -> int:
        """Leave the gradient of this replica's part, add to ``sums``; how many points all have."""
        _, counts = self.replicas.together(lambda: self._accumulate(samples, part, sigmas, sums))
        return sum(int(count or 0) for count in counts)

    @compile_failures(COMPILE)
    def _accumulate(
        self, samples: TrainingSamples, part: np.ndarray, sigmas: Tensor, sums: dict[str, float]
    ) -> int:
        """Leave the gradient of the summed losses of ``part``, add to ``sums``; how many points."""
        total = 0
        for points in self._micro_batches(samples, part, sigmas):
            loss, metrics = self._forward(samples, points)
            if not bool(torch.isfinite(loss)):
                raise self._diagnose(samples, points, f"the loss is {loss.item()}")
            # the loss is a mean over its batch, and the last batch may be smaller: sums add up
            (loss * len(points)).backward()
            total += len(points)
            for name, value in metrics.items():
                sums[name] += value.item() * len(points)
        self.trained.complete(total)
        return total

    def _micro_batches(
        self, samples: TrainingSamples, part: np.ndarray, sigmas: Tensor
    ) -> Iterator[Points]:
        """Points of the samples ``part`` in batches of ``batch_size``; the last may be smaller.

        Each sample's points come from a seed of its own, so that how they are batched changes
        nothing about them.
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
        """Adapters that equal "current" bit by bit: so do their velocities, until a step."""
        others = set(self.objective.policies) - {"current", "ref"}
        return frozenset(
            other
            for other in others
            if all(
                torch.equal(self.trained.parameters[name], p)
                for name, p in trainable(self.transformer, other)
            )
        )

    def _forward(
        self, samples: TrainingSamples, points: Points
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective's loss and metrics, with gradient for the "current" policy alone.

        A policy that still has the current weights gets the current velocities themselves: it saves
        a pass, and the ratio of their log-probabilities is 1 to the last bit whatever kernels are
        chosen with and without gradient.
        """
        cond, velocities = self._conditioning(samples, points), {}
        # "current" last: what its backward pass needs is not held during the other passes
        for policy in sorted(
            set(self.objective.policies) - self._alike, key=lambda name: (name == "current", name)
        ):
            with torch.set_grad_enabled(policy == "current"):
                velocities[policy] = self._velocity(self._denoiser, points, cond, policy)
        velocities |= {policy: velocities["current"].detach() for policy in self._alike}
        return self.objective.loss(
            points, velocities, samples.advantages[points.sample_index.cpu()].to(self.device)
        )

    def _conditioning(self, samples: TrainingSamples, points: Points) -> Conditioning:
        """A row per point."""
        return samples.cond.rows(samples.group[points.sample_index.cpu()]).to(self.device)

    def _velocity(
        self, denoiser: nn.Module, points: Points, cond: Conditioning, policy: str
    ) -> Tensor:
        """``denoiser``: the transformer itself, or its compiled form."""
        with use_adapter(self.transformer, None if policy == "ref" else policy):
            return velocity(self.family, denoiser, points.x_t, points.sigma, cond, self.guided)

    def _diagnose(self, samples: TrainingSamples, points: Points, what: str) -> NonFiniteTraining:
        """Run the batch again, policy by policy; names the first module that is not finite."""
        for policy, module in self._first_modules(samples, points):
            if module is not None:
                return NonFiniteTraining(
                    f"{what}: not finite with the {policy!r} policy first", module
                )
        return NonFiniteTraining(
            f"{what} although every velocity is finite: it overflowed in the objective"
        )

    def _first_modules(
        self, samples: TrainingSamples, points: Points
    ) -> Iterable[tuple[str, str | None]]:
        """(policy, its first module that is not finite), a pass each, eager: compiled modules do
        not say what they compute.
        """
        cond = self._conditioning(samples, points)
        for policy in self.objective.policies:
            with torch.no_grad():
                yield (
                    policy,
                    first_nonfinite_module(
                        self.transformer,
                        lambda policy=policy: self._velocity(
                            self.transformer, points, cond, policy
                        ),
                    ),
                )
