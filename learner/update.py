"""The update of one iteration: micro-batches, gradients, AdamW, for any objective and family."""

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
from policy.attention import sound_gradients
from policy.families.base import Family
from policy.lora import trainable, use
from policy.precision.compiling import compile_failures, compiled
from policy.sampling.guidance import Guided, velocity
from policy.types import Conditioning

COMPILE = "optimizer.compile"


class Updater:
    """Updater of a transformer's "current" adapter, the only weights that it changes."""

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
        """Make the optimizer steps of an iteration; return means of metrics over training points.

        There are ``steps_per_iteration`` steps at most, fewer if there are fewer samples. On any
        exception the weights and the optimizer are restored. All replicas' samples are assigned to
        steps (``learner.dealing``), and each replica computes on its own samples. ``after_step`` is
        called with 1, 2, ... after each step. Raises NonFiniteTraining, NothingLearned,
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
                with sound_gradients(self.device):
                    count, norm = self._step(samples, part, sigmas, sums)
                # after the first step "current" differs from all other adapters
                self._alike = frozenset()
                points += count
                norms.append(norm)
                if after_step is not None:
                    after_step(len(norms))
            # before the check below, as a replica that raised there would leave the others waiting
            # for its sums
            all_sums = self.replicas.exchange(sums)
            self._require_learned(samples, norms, before, learning_rate)
        except BaseException:
            # weights of an interrupted update could not be reproduced from the seed
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
    ) -> None:
        """Raise NothingLearned if there was something to learn but the weights equal ``before``.

        ``norms`` are the gradient norms of the optimizer steps.
        """
        if any(norms):
            self.trained.require_change(before, norms[-1], learning_rate)
        # not with several replicas, which could disagree: one may have only advantages of zero
        elif bool(samples.advantages.any()) and self.replicas.size == 1:
            raise NothingLearned(
                "every gradient is zero although advantages are not: the loss does not depend on"
                " the adapter"
            )

    def gradient(self, samples: TrainingSamples, sigmas: Tensor) -> Tensor:
        """Return the gradient of the mean loss over all points of ``samples``.

        It is flat, float32 [D], on the CPU. Weights do not change. Raises NonFiniteTraining.
        """
        self._alike = self._like_current()
        try:
            self.trained.forget_gradients()
            with sound_gradients(self.device):
                indices = np.arange(len(samples))
                count = self._accumulate(samples, indices, sigmas, defaultdict(float))
            gradients = [gradient.flatten() for gradient in self.trained.gradients().values()]
            return (torch.cat(gradients) / count).cpu()
        finally:
            self._alike = frozenset()
            self.trained.forget_gradients()

    def _step(
        self, samples: TrainingSamples, part: np.ndarray, sigmas: Tensor, sums: dict[str, float]
    ) -> tuple[int, float]:
        """Make one optimizer step on the mean loss over the points of all replicas' ``part``.

        Returns (number of points of all replicas, gradient norm before clipping). Gradients of
        summed losses are added over the replicas and divided by the number of points. The result is
        the mean over all points even if replicas have different numbers of them.
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
        """Compute this replica's gradients, add to ``sums``, return all replicas' point count."""
        _, counts = self.replicas.together(lambda: self._accumulate(samples, part, sigmas, sums))
        return sum(int(count or 0) for count in counts)

    @compile_failures(COMPILE)
    def _accumulate(
        self, samples: TrainingSamples, part: np.ndarray, sigmas: Tensor, sums: dict[str, float]
    ) -> int:
        """Accumulate the gradients of the summed losses of ``part``; return the point count.

        Metrics, summed over points, are added to ``sums``.
        """
        total = 0
        for points in self._micro_batches(samples, part, sigmas):
            loss, metrics = self._forward(samples, points)
            if not bool(torch.isfinite(loss)):
                raise self._diagnose(samples, points, f"the loss is {loss.item()}")
            # the loss is a mean over its batch, and batch sizes differ: accumulate sums instead
            (loss * len(points)).backward()
            total += len(points)
            for name, value in metrics.items():
                sums[name] += value.item() * len(points)
        self.trained.complete(total)
        return total

    def _micro_batches(
        self, samples: TrainingSamples, part: np.ndarray, sigmas: Tensor
    ) -> Iterator[Points]:
        """Yield the points of the samples ``part`` in batches of ``batch_size``.

        The last batch may be smaller. Each sample's points are drawn with the sample's own seed, so
        they do not depend on the batching.
        """
        size = self.settings.batch_size
        pending: list[Points] = []
        for index in part.tolist():
            rng = np.random.Generator(np.random.Philox(key=samples.seeds[index]))
            points = self.objective.points(
                {name: rows[index : index + 1] for name, rows in samples.data.items()}, sigmas, rng
            )
            pending.append(points.of_samples(index))
            if sum(map(len, pending)) >= size:
                joined = Points.cat(pending)
                full = len(joined) - len(joined) % size
                for start in range(0, full, size):
                    yield joined.rows(slice(start, start + size)).to(self.device)
                pending = [joined.rows(slice(full, None))] if full < len(joined) else []
        if pending:
            yield Points.cat(pending).to(self.device)

    def _like_current(self) -> frozenset[str]:
        """Return the policies that equal "current" bit by bit.

        Their velocities are equal too, until the next optimizer step.
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
        """Return the objective's loss and metrics; only the "current" policy has a gradient.

        A policy whose weights still equal the current ones reuses the current velocities. This
        saves a pass, and makes the ratio of their log-probabilities exactly 1, even if different
        kernels run with and without gradient.
        """
        cond, velocities = self._conditioning(samples, points), {}
        # "current" last: its saved activations are then not in memory during the other passes
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
        """Return the conditioning of the points, one row each, on the device."""
        return samples.cond.rows(samples.group[points.sample_index.cpu()]).to(self.device)

    def _velocity(
        self, denoiser: nn.Module, points: Points, cond: Conditioning, policy: str
    ) -> Tensor:
        """Return a policy's velocities; ``denoiser`` is the transformer or its compiled form."""
        with use(self.transformer, None if policy == "ref" else policy):
            return velocity(self.family, denoiser, points.x_t, points.sigma, cond, self.guided)

    def _diagnose(self, samples: TrainingSamples, points: Points, what: str) -> NonFiniteTraining:
        """Rerun a batch policy by policy; return an error that names the first faulty module."""
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
        """Yield (policy, its first module with an output that is not finite, or None).

        Each item takes one forward pass. It runs eagerly, as hooks do not see the outputs of
        modules within compiled code.
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
