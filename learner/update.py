"""The update of one iteration, for any objective and family: micro-batches, gradients, AdamW."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from configs.training import Optimizer
from learner.batch import TrainingSamples
from learner.nonfinite import NonFiniteTraining, first_nonfinite_module
from learner.objectives.base import Objective, Points
from learner.replicas import Replicas
from learner.step_assignment import StepAssignment
from learner.trained_adapter import NothingLearned, TrainedAdapter
from policy.attention import without_cudnn_attention
from policy.families.base import Family
from policy.lora import trainable, use_adapter
from policy.precision.compiling import compile_failures, compiled
from policy.sampling.guidance import Guided, velocity
from policy.types import Conditioning

COMPILE = "optimizer.compile"


class Updater:
    """Updates the adapter "current" of a transformer, and nothing else."""

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
        """Take ``steps_per_iteration`` optimizer steps; return means over all training points.

        If anything raises, weights and optimizer are restored. The samples of all replicas are
        distributed over the steps (``learner.step_assignment``), and each replica computes on its
        own samples. ``after_step`` is called with 1, 2, ... after each step. Raises
        NonFiniteTraining, NothingLearned, ReplicaFailed and GroupBroken.
        """
        self.trained.set_rate(learning_rate)
        before = self.trained.state()
        sums: defaultdict[str, float] = defaultdict(float)
        points, norms = 0, []
        self._alike = self._like_current()
        try:
            assigned = StepAssignment.of(self.settings).assign(samples.total, shuffle_seed)
            for step in range(int(assigned.max()) + 1):
                part = np.flatnonzero(assigned[samples.places] == step)
                with without_cudnn_attention(self.device):
                    count, norm = self._step(samples, part, sigmas, sums)
                # from the first step on "current" differs from all other adapters
                self._alike = frozenset()
                points += count
                norms.append(norm)
                if after_step is not None:
                    after_step(len(norms))
            # before the check below: if one replica raised there, the others would wait for its
            # sums
            all_sums = self.replicas.all_gather(sums)
            self._require_learned(samples, norms, before, learning_rate, sums)
        except BaseException:
            # also if interrupted: otherwise the weights could not be reproduced
            self.trained.load_state(before)
            raise
        finally:
            self._alike = frozenset()
            self.trained.forget_gradients()
        names = dict.fromkeys(name for part in all_sums for name in part)
        return {name: sum(part.get(name, 0.0) for part in all_sums) / points for name in names} | {
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
        sums: Mapping[str, float],
    ) -> None:
        """Raise NothingLearned if the steps changed no weight although they should have.

        ``norms`` are those of the steps' gradients, ``before`` is the state before the steps and
        ``sums`` are the sums of metrics over the points. Nothing else would report such a run.
        """
        if any(norms):
            if learning_rate and not self.trained.changed_since(before):
                raise NothingLearned(
                    "the optimizer changed no weight although the gradient's norm is"
                    f" {norms[-1]:.3g}: at optimizer.lr = {learning_rate:g} a step is lost to"
                    " rounding, or was skipped; raise it"
                )
            return
        # only for a single replica: advantages may be zero here but not in other replicas
        if self.replicas.size > 1 or not bool(samples.advantages.any()):
            return
        if not sums.get("loss/clip_share"):
            raise NothingLearned(
                "every gradient is zero although advantages are not: the loss does not depend on"
                " the adapter"
            )
        # clipped ratios have no gradient; the moments of earlier steps may still move the weights
        if learning_rate and not self.trained.changed_since(before):
            raise NothingLearned(
                "every gradient is zero, and no weight changed: the ratios of all samples are"
                " outside of objective.ratio_clip; raise it, or lower optimizer.lr or the decay of"
                " old_policy"
            )

    def gradient(self, samples: TrainingSamples, sigmas: Tensor) -> Tensor:
        """Return the gradient of the mean loss over all points of ``samples``.

        It is flat, float32 [D], on the CPU. Weights do not change. Raises NonFiniteTraining.
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
        """Take one optimizer step on the mean loss over the points of ``part`` in all replicas.

        Returns (number of points in all replicas, gradient norm before clipping). Replicas add up
        sums over points and divide by the number of all points, which gives the mean over points
        however unequal their parts are.
        """
        self.trained.forget_gradients()
        total = self._gradients(samples, part, sigmas, sums)
        gradients = list(self.trained.gradients().values())
        self.replicas.all_reduce(gradients)
        for gradient in gradients:
            gradient.div_(total)
        return total, self.trained.step()

    def _gradients(
        self, samples: TrainingSamples, part: np.ndarray, sigmas: Tensor, sums: dict[str, float]
    ) -> int:
        """Compute the gradient of this replica's part; return the number of points of all."""
        _, counts = self.replicas.run_on_all(lambda: self._accumulate(samples, part, sigmas, sums))
        return sum(int(count or 0) for count in counts)

    @compile_failures(COMPILE)
    def _accumulate(
        self, samples: TrainingSamples, part: np.ndarray, sigmas: Tensor, sums: dict[str, float]
    ) -> int:
        """Accumulate the gradient of the summed losses of ``part``; return the number of points.

        Metrics, summed over points, are added to ``sums``.
        """
        total = 0
        for points in self._micro_batches(samples, part, sigmas):
            loss, metrics = self._forward(samples, points)
            if not bool(torch.isfinite(loss)):
                raise self._diagnose(samples, points, f"the loss is {loss.item()}")
            # the loss is a mean over its batch; weight it, as the last batch may be smaller
            (loss * len(points)).backward()
            total += len(points)
            for name, value in metrics.items():
                sums[name] += value.item() * len(points)
        self.trained.fill_missing_gradients(total)
        return total

    def _micro_batches(
        self, samples: TrainingSamples, part: np.ndarray, sigmas: Tensor
    ) -> Iterator[Points]:
        """Yield the training points of the samples ``part`` in batches of ``batch_size``.

        The last batch may be smaller. Each sample's points are drawn from a seed of its own, so
        that they do not depend on the batching.
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
        """Return the adapters that are bit-identical to "current".

        Their velocities are identical too, until the first optimizer step.
        """
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
        """Return the objective's loss and metrics, with gradients for the policy "current" only.

        A policy that still has the current weights reuses the current velocities. This saves a
        pass, and makes the ratio of log-probabilities exactly 1 even if torch chooses different
        kernels with and without gradients.
        """
        cond, velocities = self._conditioning(samples, points), {}
        # "current" last, so that its activations are not in memory during the other passes
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
        """Return the conditioning, one row per point."""
        return samples.cond.rows(samples.group[points.sample_index.cpu()]).to(self.device)

    def _velocity(
        self, denoiser: nn.Module, points: Points, cond: Conditioning, policy: str
    ) -> Tensor:
        """Return the velocities of one policy.

        ``denoiser`` is the transformer or its compiled form.
        """
        with use_adapter(self.transformer, None if policy == "ref" else policy):
            return velocity(self.family, denoiser, points.x_t, points.sigma, cond, self.guided)

    def _diagnose(self, samples: TrainingSamples, points: Points, what: str) -> NonFiniteTraining:
        """Repeat the batch for each policy, to name the first module with a non-finite output."""
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
        """Yield (policy, its first non-finite module or None), with an eager pass for each.

        Compiled blocks have no modules that could be observed.
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
