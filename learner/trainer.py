"""The learner: regenerates selected noises at full precision, trains the LoRA on them, keeps the averages, exports the policy.

One process, no ray: the ring's learner actor is a thin shell around ``Trainer``, and so is a plain training loop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from configs.schema import RunConfig
from learner import checkpoint
from learner.advantages import advantages
from learner.objectives import Record, build_objective
from learner.schedules import learning_rate, old_policy_decay
from learner.update import NonFiniteTraining, Samples, Updater
from policy.families import Family, family_for
from policy.lora import adapter_state, add_adapters, blend, load_adapter_state, trainable, use
from policy.precision.backends import Backend, packing_backend
from policy.precision.compiling import compiled
from policy.precision.swap import ModuleRow, quantise_plan
from policy.precision.wire import Manifest
from policy.publish import NonFiniteWeights, Publisher
from policy.sampling.noise import stream_seed
from policy.sampling.sample import sample
from policy.sampling.sde import sample_paths
from policy.types import Conditioning

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ADAPTER_FILES = {"current": "adapter", "old": "old", "ema": "ema"}
PREVIOUS = "previous"
"""The sampling policy of one update before, kept where that explores (``explore_ahead``)."""


@dataclass(frozen=True)
class Group:
    """One prompt's samples."""

    prompt_index: int  # position in the iteration
    cond: Conditioning  # 1 row
    samples: Record  # "latents" float32 [K, *latent], x0, and what else regeneration recorded, [K, ...] each
    rewards: np.ndarray  # float32 [K], of these very latents


class Trainer:
    """Base model in ``regenerate.precision``, LoRA adapters in FP32, autoencoder in FP32.

    Iterations count from 1 as s in the papers: after the first ``update`` s = 1. All randomness is drawn from the run seed,
    the iteration and the prompt, never from a global generator, so (run seed, iterations done) is the whole random state.
    """

    def __init__(
        self,
        config: RunConfig,
        family: Family | None = None,
        transformer: nn.Module | None = None,
        vae: nn.Module | None = None,
        device: torch.device | str = "cpu",
        failure_dir: str | Path | None = None,
    ) -> None:
        """Loads what is not given. ``failure_dir`` takes the data of an iteration that fails."""
        self.config, self.device = config, torch.device(device)
        self.family = family or family_for(config.model)
        self.failure_dir = Path(failure_dir) if failure_dir is not None else None
        self.objective = build_objective(config.objective, config.stop.max_kl is not None)
        dtype = DTYPES[config.regenerate.precision]
        self.transformer = transformer if transformer is not None else self.family.load_transformer(self.device, dtype)
        self.vae = vae if vae is not None else self.family.load_vae(self.device, torch.float32)
        wanted = {self.objective.sampling_adapter, *self.objective.policies, *self.objective.averages, "ema"} - {"ref", "current"}
        if config.explore_ahead:
            wanted.add(PREVIOUS)
        self.adapters = ("current", *sorted(wanted))
        add_adapters(self.transformer, config.lora, self.family, names=self.adapters, seed=stream_seed(config.seed, "lora"))
        if config.optimizer.gradient_checkpointing:
            denoiser: Any = self.transformer
            denoiser.enable_gradient_checkpointing()  # what it recomputes, it does with "current" active
        self._denoiser = compiled(self.transformer, self.device) if config.regenerate.compile else self.transformer
        self.sigmas = self.family.sigmas(config.regenerate.steps)
        self.updater = Updater(self.family, self.transformer, self.objective, config.optimizer, self.device)
        self.done = 0
        self.last_iteration: int | None = None
        self._publisher: Publisher | None = None
        self._trained: tuple[Sequence[Group], Sequence[np.ndarray]] | None = None  # of the last update, until it is exported

    @property
    def trainable_parameters(self) -> int:
        """How many numbers are trained."""
        return sum(parameter.numel() for _, parameter in trainable(self.transformer))

    def regenerate(
        self,
        cond: Conditioning,
        seeds: Sequence[int],
        steps: int | None = None,
        weights: str | None = None,
        solver: str | None = None,
        batch_size: int | None = None,
    ) -> tuple[Record, np.ndarray]:
        """(samples, images uint8 [K, 3, H, W]) of K seeds; samples has "latents" float32 [K, *latent].

        With the objective's stochastic solver it also has "states" float32 [K, T + 1, *latent] and "log_probs" float32 [K, T].
        cond has one row, for all seeds, or K. ``weights`` is "current", "old", "ema" or "base" (adapters off); None is the
        sampling policy. What is not given is as in ``[regenerate]``.
        """
        settings = self.config.regenerate
        name = self.objective.sampling_adapter if weights is None else weights
        if name != "base" and name not in self.adapters:
            raise ValueError(f"weights {name!r} are unknown: use one of {', '.join((*self.adapters, 'base'))}")
        size = batch_size or settings.batch_size
        rows = cond.repeat(len(seeds)) if len(cond) == 1 else cond
        with torch.no_grad(), use(self.transformer, None if name == "base" else name):
            samples = self._draw(rows, list(seeds), steps or settings.steps, solver or self.config.plan.solver, size)
            images = self.family.decode(self.vae, samples["latents"], batch_size=size)
        return {key: tensor.numpy() for key, tensor in samples.items()}, images.numpy()

    def _draw(self, rows: Conditioning, seeds: list[int], steps: int, solver: str, size: int) -> dict[str, Tensor]:
        """The samples of ``regenerate``. A path's noise comes from a stream of its own, named by the sample's seed."""
        paths = self.objective.path_solver
        if paths is None or solver != paths.name:
            return {"latents": sample(self.family, self._denoiser, rows, seeds, steps, solver, batch_size=size)}
        starts = seeds[:1] * len(seeds) if self.objective.one_noise else seeds
        streams = [stream_seed(self.config.seed, "sde", seed) for seed in seeds]
        drawn = sample_paths(self.family, self._denoiser, rows, starts, streams, steps, paths, batch_size=size)
        return {"latents": drawn.states[:, -1].contiguous(), "states": drawn.states, "log_probs": drawn.log_probs}

    def update(self, iteration: int, groups: Sequence[Group]) -> dict[str, float]:
        """Train on one iteration's samples, then move the old policy and the averages; returns its metrics.

        ``iteration`` names the random streams and must rise from call to call. Groups are trained on in prompt order, in
        whichever order they come. All or nothing. Raises NonFiniteTraining after writing the iteration's data to
        ``failure_dir``, ValueError for groups that cannot be trained on.
        """
        start = time.perf_counter()
        if self.last_iteration is not None and iteration <= self.last_iteration:
            raise ValueError(
                f"iteration {iteration} was trained already, the last one was {self.last_iteration}: nothing may count twice"
            )
        groups = sorted(groups, key=lambda group: group.prompt_index)
        self._check(groups)
        values, metrics = advantages([group.rewards for group in groups], self.config.resolved_advantages)
        rate = learning_rate(self.config.optimizer, self.done, self.config.iterations)
        sampled_with = adapter_state(self.transformer, self.objective.sampling_adapter) if PREVIOUS in self.adapters else None
        try:
            samples = self._samples(iteration, groups, values)
            metrics |= self.updater.run(samples, self.sigmas, rate, stream_seed(self.config.seed, "shuffle", iteration))
        except NonFiniteTraining as error:
            raise NonFiniteTraining(
                f"iteration {iteration}: {error.what}",
                error.module,
                f"weights are as before this iteration, {self._keep_evidence(iteration, groups, values, str(error))}",
            ) from error
        self.done += 1
        self.last_iteration = iteration
        self._trained = (groups, values) if self.config.plan.explore else None
        if sampled_with is not None:
            load_adapter_state(self.transformer, PREVIOUS, sampled_with)
        metrics |= self._move_averages()
        return metrics | {"time/update_s": time.perf_counter() - start}

    @property
    def quantisation_table(self) -> list[dict[str, Any]]:
        """A dict (name, shape, quantised, why, the explorers' backend) per module with a weight matrix, as of the last export; empty
        where nobody explores."""
        if not self.config.plan.explore:
            return []
        backend, rows = self._exploring
        return [asdict(row) | {"backend": backend.name} for row in rows]

    @cached_property
    def _exploring(self) -> tuple[Backend, list[ModuleRow]]:
        """The explorers' backend, resolved for their kind of device, and which modules it runs quantised."""
        explore = self.config.plan.explore
        if explore is None:
            raise ValueError(f"arm {self.config.arm!r} explores nothing, so there is nothing to export")
        device = "cuda" if self.config.services.rollout.gpus and torch.cuda.is_available() else "cpu"
        return self._packing(packing_backend(explore.backend, device))

    def _packing(self, backend: Backend) -> tuple[Backend, list[ModuleRow]]:
        return backend, quantise_plan(self.transformer, self.family, self.config.explore.keep_wide, backend)

    def export(
        self, version: int, backend: str | None = None, weights: str | None = None
    ) -> tuple[Manifest, list[np.ndarray], dict[str, float]]:
        """(manifest, uint8 chunks, statistics against the export before) of the sampling policy, merged, in the explorers' format.

        ``backend`` is the one that explorers run, where they know better than this process: on their device "auto" may be another.
        ``weights``: another adapter than that of the sampling policy.
        Raises NonFiniteWeights naming the module, after writing the data of the iteration that led there to ``failure_dir``,
        ValueError for an arm that explores nothing.
        """
        if backend is not None and backend != self._exploring[0].name:
            self._exploring, self._publisher = self._packing(packing_backend(backend, self.device)), None
        if self._publisher is None:
            chosen, plan = self._exploring
            explore, chunk_bytes = self.config.explore, self.config.publish.chunk_mb * 2**20
            self._publisher = Publisher(self.transformer, plan, chosen, chunk_bytes, explore.scale_search, explore.frozen_amax)
        try:
            exported = self._publisher.export(weights or self.objective.sampling_adapter, version)
        except NonFiniteWeights as error:
            if self._trained is not None and self.last_iteration is not None:
                kept = self._keep_evidence(self.last_iteration, *self._trained, str(error))
                error.args = (f"{error}; weights are as after iteration {self.last_iteration}, {kept}",)
            raise
        self._trained = None
        return exported

    def _check(self, groups: Sequence[Group]) -> None:
        indices = [group.prompt_index for group in groups]
        if len(set(indices)) != len(indices):
            raise ValueError(f"groups of prompts {indices}: each prompt may come once, nothing may count twice")
        for group in groups:
            count, latents = len(group.rewards), group.samples["latents"]
            shape = (count, *self.family.latent_shape)
            if latents.shape != shape or len(group.cond) != 1 or any(len(rows) != count for rows in group.samples.values()):
                raise ValueError(
                    f"prompt {group.prompt_index}: latents {list(latents.shape)} and conditioning of {len(group.cond)} rows, "
                    f"wanted {list(shape)} for its {count} rewards, and 1 row; every other array needs {count} rows too"
                )
            missing = {"states", "log_probs"} - group.samples.keys() if self.objective.path_solver else set()
            if missing:
                raise ValueError(
                    f"prompt {group.prompt_index}: no {' and no '.join(sorted(missing))}: this objective trains on the paths of its "
                    "own stochastic solver, regenerate with it"
                )

    def _samples(self, iteration: int, groups: Sequence[Group], values: Sequence[np.ndarray]) -> Samples:
        for group in groups:
            for name, rows in group.samples.items():
                if not np.isfinite(rows).all():
                    raise NonFiniteTraining(f"the regenerated {name} of prompt {group.prompt_index} are not finite")
        joined = {
            name: np.concatenate([np.asarray(group.samples[name], np.float32) for group in groups]) for name in groups[0].samples
        }
        return Samples(
            data={name: torch.from_numpy(rows) for name, rows in joined.items()},
            advantages=torch.from_numpy(np.concatenate(list(values))),
            cond=Conditioning.cat([group.cond for group in groups]).to(self.device),
            group=torch.arange(len(groups), device=self.device).repeat_interleave(
                torch.tensor([len(group.rewards) for group in groups], device=self.device)
            ),
            seeds=tuple(
                stream_seed(self.config.seed, "train", iteration, group.prompt_index, position)
                for group in groups
                for position in range(len(group.rewards))
            ),
        )

    def _move_averages(self) -> dict[str, float]:
        blend(self.transformer, "ema", "current", self.config.ema.decay)
        for name, decay_after in self.objective.averages.items():
            blend(self.transformer, name, "current", decay_after(self.done))
        if "old" not in self.adapters:
            return {}
        decay = old_policy_decay(self.config.resolved_old_policy, self.done)
        blend(self.transformer, "old", "current", decay)
        return {"old_policy/decay": decay}

    def _keep_evidence(self, iteration: int, groups: Sequence[Group], values: Sequence[np.ndarray], reason: str) -> str:
        """Save an iteration's data and the adapters as they are now, to look at or repeat it; says where, or why not."""
        if self.failure_dir is None:
            return "its data were not saved, as no failure directory was given"
        path = self.failure_dir / f"iteration_{iteration:06d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for group, advantage in zip(groups, values, strict=True):
            key = f"prompt_{group.prompt_index:04d}"
            tensors |= {f"{key}/{name}": _tensor(rows) for name, rows in group.samples.items()}
            tensors |= {f"{key}/rewards": _tensor(group.rewards), f"{key}/advantages": _tensor(advantage)}
            tensors |= {f"{key}/cond/{name}": tensor for name, tensor in group.cond.tensors.items()}
        for name in self.adapters:
            tensors |= {f"adapter/{name}/{key}": tensor for key, tensor in adapter_state(self.transformer, name).items()}
        try:
            checkpoint.save_tensors(path, tensors, {"iteration": str(iteration), "seed": str(self.config.seed), "reason": reason})
        except OSError as error:
            return f"its data could not be saved to {str(path)!r}: {error.strerror or error}"
        return (
            f"its data are in {str(path)!r}: look there, then lower optimizer.lr or "
            "max_grad_norm, or mend the scorer, and start again from the last checkpoint"
        )

    def save(self, path: str | Path, extra_state: dict[str, Any]) -> None:
        """Write a checkpoint directory atomically and prune its siblings to ``checkpoint.keep_last``.

        ``extra_state`` is anything JSON can hold. Raises CheckpointError, leaving the checkpoints before whole.
        """
        optimizer = {key: value for key, value in self.updater.state().items() if not key.startswith("weight/")}
        files = {ADAPTER_FILES.get(name, name): adapter_state(self.transformer, name) for name in self.adapters}
        state = {"seed": self.config.seed, "done": self.done, "last_iteration": self.last_iteration, "extra": extra_state}
        checkpoint.write(path, {**files, "optimizer": optimizer}, state)
        checkpoint.prune(Path(path).parent, self.config.checkpoint.keep_last)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Restore a checkpoint bit by bit; returns its extra state. Raises CheckpointError, then nothing has changed."""
        files, state = checkpoint.read(path)
        if state["seed"] != self.config.seed:
            raise checkpoint.CheckpointError(
                f"checkpoint {str(path)!r} is of run seed {state['seed']}, this run has seed {self.config.seed}: use the same"
            )
        for name in self.adapters:
            file = ADAPTER_FILES.get(name, name)
            checkpoint.require_same(files.get(file, {}), adapter_state(self.transformer, name), f"checkpoint {str(path)!r}, {file}")
        self._check_optimizer(path, files.get("optimizer", {}))
        for name in self.adapters:
            load_adapter_state(self.transformer, name, files[ADAPTER_FILES.get(name, name)])
        weights = {key: value for key, value in self.updater.state().items() if key.startswith("weight/")}
        self.updater.load_state({**weights, **files["optimizer"]})
        self.done, self.last_iteration = state["done"], state["last_iteration"]
        return state["extra"]

    def _check_optimizer(self, path: str | Path, tensors: dict[str, Tensor]) -> None:
        if not tensors:  # saved before the first update
            return
        wanted: dict[str, Tensor] = {}
        for name, parameter in self.updater.parameters.items():
            wanted |= {
                f"exp_avg/{name}": parameter.detach(),
                f"exp_avg_sq/{name}": parameter.detach(),
                f"step/{name}": torch.zeros(()),
            }
        checkpoint.require_same(tensors, wanted, f"checkpoint {str(path)!r}, optimizer")


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32))
