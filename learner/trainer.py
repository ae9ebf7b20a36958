"""The learner without Ray: trains the LoRA, keeps averages, exports, and regenerates seeds.

The learner actor is a thin wrapper around ``Trainer``; a single-process training loop uses it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from configs.schema import RunConfig
from configs.section import Tree
from learner.advantages import advantages
from learner.averages import PREVIOUS, Averages, adapters_of
from learner.batch import Group, TrainingSamples, check_groups, join_groups, save_failure_data
from learner.export import PolicyExporter
from learner.generator import Generator
from learner.lockstep import LockstepUpdater, collective
from learner.nonfinite import NonFiniteTraining
from learner.objectives import build_objective
from learner.publish import Export, NonFiniteWeights
from learner.replicas import Replicas
from learner.schedules import learning_rate
from learner.state import Counts, LearnerState
from learner.update import Updater
from policy.checkpointing import checkpoint_blocks
from policy.families import Family, family_for
from policy.frozen import freeze
from policy.lora import adapter_state, add_adapters, load_adapter_state, trainable
from policy.lora_files import ENDING
from policy.offload import Offload, frozen_tensors
from policy.sampling.guidance import Guided
from policy.sampling.noise import stream_seed
from policy.sharding import shard_base
from policy.types import DTYPES


class Trainer:
    """The learner: base model in ``regenerate.precision``, LoRA adapters and autoencoder in FP32.

    Training passes, and the sampling of paths to train on, compute adapters beside the weights; all
    other passes use merged weights. Iterations count from 1, as s in the papers: s = 1 after the
    first ``update``. All randomness is derived from the run seed, the iteration and the prompt,
    never from a global generator, so that run seed and number of updates are the whole random
    state.
    """

    def __init__(
        self,
        config: RunConfig,
        family: Family | None = None,
        transformer: nn.Module | None = None,
        vae: nn.Module | None = None,
        device: torch.device | str = "cpu",
        failure_dir: str | Path | None = None,
        shard: bool = False,
        offload: bool = False,
    ) -> None:
        """Load the models that are not passed.

        The data of a failed iteration are saved in ``failure_dir``. With ``shard``, ``join`` shards
        the base over the replicas; until then it is in host memory. With ``offload``, frozen
        weights and the autoencoder start in host memory, and ``offload.to_device`` moves them to
        ``device``; adapters and optimizer state always stay on ``device``.
        """
        self.config, self.device = config, torch.device(device)
        self.family = family = family or family_for(config.model)
        self.failure_dir = Path(failure_dir) if failure_dir is not None else None
        objective = build_objective(config.objective, config.stop.max_kl is not None)
        self.objective, self.adapters = objective, adapters_of(config, objective)
        self.sharded, home = shard, torch.device("cpu") if offload else self.device
        dtype = DTYPES[config.regenerate.precision]
        transformer = transformer if transformer is not None else self._load(dtype, home)
        self.transformer = transformer
        self.vae = vae if vae is not None else family.load_vae(home, torch.float32)
        seed = stream_seed(config.seed, "lora")
        self.left_out = add_adapters(transformer, config.lora, family, self.adapters, seed)
        self.offload = self._offloaded() if offload else None
        # after adding the adapters: blocks are recomputed with "current" active
        checkpoint_blocks(transformer, config.optimizer.recomputed)
        self.generator = Generator(
            config, family, transformer, self.vae, objective, self.adapters, self.device, shard
        )
        self.sigmas = family.sigmas(config.regenerate.steps)
        guided = Guided.of(config.guidance, "train")
        self.updater = (LockstepUpdater if shard else Updater)(
            family, transformer, objective, config.optimizer, self.device, guided
        )
        self._state = LearnerState(config, transformer, self.adapters, self.updater.trained)
        self._averages = Averages(config, objective, transformer)
        self.replicas = Replicas()
        self.exporter = PolicyExporter(config, family, transformer, self.device)
        self.done = 0
        self.last_iteration: int | None = None
        # samples and advantages of the last update, kept by rank 0 until the result is exported
        self._trained: tuple[Sequence[Group], Mapping[int, np.ndarray]] | None = None

    @property
    def trainable_parameters(self) -> int:
        """Number of trained parameters."""
        return sum(parameter.numel() for _, parameter in trainable(self.transformer))

    def _offloaded(self) -> Offload:
        for name, parameter in self.transformer.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.to(self.device)
        return Offload(frozen_tensors(self.transformer, self.vae), self.device)

    def _load(self, dtype: torch.dtype, home: torch.device) -> nn.Module:
        """Load the base model to its first location.

        A packed base is packed before it is moved to the device, which may not have enough memory
        for the unpacked one.
        """
        base = self.config.lora.base
        if self.sharded:
            return self.family.load_transformer("cpu", dtype)
        if base == "full":
            return self.family.load_transformer(home, dtype)
        transformer = self.family.load_transformer("cpu", dtype)
        freeze(transformer, self.family, base, self.config.explore.modules_to_not_convert)
        return transformer.to(self.device)

    def join(self, replicas: Replicas) -> None:
        """Train together with ``replicas`` from now on.

        Raises GroupBroken, and ReplicasDiffer if their states differ.
        """
        self.replicas = self.updater.replicas = self.generator.replicas = replicas
        replicas.require_alike(f"{self.done} updates, {self.checksum()}", "at the start")
        if self.sharded:
            with collective(replicas, "sharing the base"):
                shard_base(self.transformer, self.device)

    def checksum(self) -> str:
        """Return the xxh3-128 of all adapters in hex; equal checksums mean equal bits."""
        return self._state.checksum()

    def update(
        self,
        iteration: int,
        groups: Sequence[Group],
        elsewhere: Mapping[int, np.ndarray] | None = None,
    ) -> dict[str, float]:
        """Train on one iteration's samples, then update the averages; return metrics.

        ``iteration`` identifies the random streams and must increase from call to call. Groups are
        trained on in the order of prompts, whatever order they are passed in. With several
        replicas, each is passed its own groups (at least a part of one), and in ``elsewhere`` the
        rewards [K] of all other prompts by prompt index. All replicas take the same steps, which
        equal those of a single learner with all groups up to the order of sums.

        If an optimizer step raises, no replica has changed. Raises NonFiniteTraining, after saving
        the iteration's data in ``failure_dir``, ValueError for groups that cannot be trained on,
        and NothingLearned; with several replicas also ReplicaFailed, ReplicasDiffer, GroupBroken.
        """
        groups = sorted(groups, key=lambda group: group.prompt_index)
        (values, metrics), _ = self.replicas.run_on_all(
            lambda: self._advantages(iteration, groups, elsewhere or {})
        )
        rate = learning_rate(self.config.optimizer, self.done, self.config.iterations)
        # copied now, because the averages change it below
        sampled_with = (
            adapter_state(self.transformer, self.objective.sampling_adapter)
            if PREVIOUS in self.adapters
            else None
        )
        try:
            samples, _ = self.replicas.run_on_all(
                lambda: join_groups(groups, values, self.config.seed, iteration, self.device)
            )
            metrics |= self._train(samples, rate, iteration)
        except NonFiniteTraining as error:
            kept = self._keep_evidence(iteration, groups, values, str(error))
            raise NonFiniteTraining(
                f"iteration {iteration}: {error.what}",
                error.module,
                f"weights are as before this iteration, {kept}",
            ) from error
        self.done = self.generator.updates = self.done + 1
        self.last_iteration = iteration
        self._trained = (
            (groups, values) if self.config.plan.explore and self.replicas.rank == 0 else None
        )
        if sampled_with is not None:
            load_adapter_state(self.transformer, PREVIOUS, sampled_with)
        metrics |= self._averages.after_iteration(self.done)
        if self.replicas.size > 1:
            self.replicas.require_alike(
                f"{self.done} updates, {self.checksum()}", f"after iteration {iteration}"
            )
        return metrics | self.replicas.take_times()

    def _train(self, samples: TrainingSamples, rate: float, iteration: int) -> dict[str, float]:
        """Take the optimizer steps, and update the averages that follow each step.

        If anything raises, weights and averages are restored.
        """
        shuffle = stream_seed(self.config.seed, "shuffle", iteration)
        if not self._averages.by_step:
            return self.updater.run(samples, self.sigmas, rate, shuffle)
        before = self._averages.states()
        try:
            follow = partial(self._averages.after_step, self.done)
            return self.updater.run(samples, self.sigmas, rate, shuffle, follow)
        except BaseException:
            self._averages.restore(before)
            raise

    def _advantages(
        self, iteration: int, groups: Sequence[Group], elsewhere: Mapping[int, np.ndarray]
    ) -> tuple[dict[int, np.ndarray], dict[str, float]]:
        """Return (advantages [K] by prompt, of all replicas; metrics). Raises ValueError."""
        if self.last_iteration is not None and iteration <= self.last_iteration:
            raise ValueError(
                f"iteration {iteration} was already trained on, the last one is"
                f" {self.last_iteration}: no iteration may be trained on twice"
            )
        check_groups(
            groups, elsewhere, self.family.latent_shape, self.objective.path_solver is not None
        )
        rewards = dict(
            sorted({**{group.prompt_index: group.rewards for group in groups}, **elsewhere}.items())
        )
        values, metrics = advantages(list(rewards.values()), self.config.resolved_advantages)
        return dict(zip(rewards, values, strict=True)), metrics

    def export(
        self, version: int, backend: str | None = None, weights: str | None = None
    ) -> Export:
        """Merge and pack the sampling policy, or the adapter ``weights``, for rollout actors.

        ``backend`` is the one that rollout actors use; None resolves the configured one on this
        process's device, where "auto" may differ from theirs. Raises NonFiniteWeights with the
        module's name, after saving the data of the iteration that led to it in ``failure_dir``, and
        ValueError for an arm that does not explore.
        """
        adapter = weights or self.objective.sampling_adapter
        try:
            exported = self.exporter.export(adapter, version, backend)
        except NonFiniteWeights as error:
            if self._trained is not None and self.last_iteration is not None:
                kept = self._keep_evidence(self.last_iteration, *self._trained, str(error))
                error.args = (
                    f"{error}; weights are as after iteration {self.last_iteration}, {kept}",
                )
            raise
        self._trained = None
        return exported

    def _keep_evidence(
        self, iteration: int, groups: Sequence[Group], values: Mapping[int, np.ndarray], reason: str
    ) -> str:
        """Save this replica's data of an iteration, and the adapters; return where, or why not."""
        replica = f".replica-{self.replicas.rank}" if self.replicas.size > 1 else ""
        name = f"iteration_{iteration:06d}{replica}{ENDING}"
        path = self.failure_dir / name if self.failure_dir is not None else None
        metadata = {"iteration": str(iteration), "seed": str(self.config.seed), "reason": reason}
        return save_failure_data(path, groups, values, self._state.adapters(), metadata)

    def save(self, path: str | Path, extra_state: Tree) -> None:
        """Write a checkpoint directory atomically; keep the last ``checkpoint.keep_last``.

        ``extra_state`` is any JSON value. Raises CheckpointError; earlier checkpoints are then
        unchanged.
        """
        self._state.save(path, Counts(self.done, self.last_iteration), extra_state)

    def load(self, path: str | Path) -> Tree:
        """Restore a checkpoint exactly; return its extra state.

        Raises CheckpointError before anything has changed.
        """
        counts, extra_state = self._state.load(path)
        self.done, self.last_iteration = counts
        self.generator.updates = self.done
        return extra_state
