"""The learner: trains the LoRA, maintains averages, exports; its ``generator`` regenerates seeds.

It is a single process and does not use Ray: the learner actor is a thin wrapper of ``Trainer``, and
a plain training loop can use it directly.
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
from learner.batch import Group, TrainingSamples, check_groups, joined, keep_evidence
from learner.export import PolicyExporter
from learner.generating import Generator
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
    """Trainer of LoRA adapters in FP32 on a frozen base model.

    The base model is in ``regenerate.precision``, the autoencoder in FP32. Training, and sampling
    paths to train on, compute with unmerged adapters; all other sampling merges them into the
    weights (``Generator.generate`` has the exceptions).

    Iterations count from 1, as s in the papers: after the first ``update`` s = 1. All randomness is
    derived from the run seed, the iteration and the prompt, never from a global generator, so (run
    seed, iterations done) is the whole random state.
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
        """Load the family, transformer and autoencoder that are None.

        ``failure_dir`` is where the data of a failed iteration are saved. ``shard``: ``join``
        shards the base over the replicas; until then it is in host memory. ``offload``: frozen
        weights and autoencoder start in host memory and ``offload.back`` moves them to ``device``;
        adapters and optimizer state are always on ``device``.
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
        add_adapters(transformer, config.lora, family, self.adapters, seed)
        self.offload = self._offloaded() if offload else None
        # blocks are recomputed in the backward pass, where "current" is the active adapter
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
        # samples and advantages of the last update, kept on rank 0 until the next export succeeds
        self._trained: tuple[Sequence[Group], Mapping[int, np.ndarray]] | None = None

    @property
    def trainable_parameters(self) -> int:
        """The number of trained parameters."""
        return sum(parameter.numel() for _, parameter in trainable(self.transformer))

    def _offloaded(self) -> Offload:
        """Move the adapters to the device; return the offload of everything that is frozen."""
        for name, parameter in self.transformer.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.to(self.device)
        return Offload(frozen_tensors(self.transformer, self.vae), self.device)

    def _load(self, dtype: torch.dtype, home: torch.device) -> nn.Module:
        """Load the base model onto its initial device.

        If ``lora.base`` packs it, it is packed in host memory and then moved, as the device may
        have no room for the unpacked weights.
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
        """Join a group of replicas for all further updates.

        Raises GroupBroken, and ReplicasDiffer if the replicas' states differ.
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
        """Train on one iteration's samples, move the averages, and return metrics.

        ``iteration`` selects the random streams and must increase from call to call. The order of
        ``groups`` does not matter: they are trained on in prompt order.

        With several replicas, each call passes the replica's own groups (at least one, or part of
        one) and in ``elsewhere`` the rewards [K] of all other prompts by prompt index. All replicas
        make the same step, which equals that of a single learner with all groups up to the order of
        summation.

        The update is applied completely or not at all, on every replica. Raises NonFiniteTraining
        after saving the iteration's data to ``failure_dir``, ValueError for groups that cannot be
        trained on, and with several replicas also ReplicaFailed, ReplicasDiffer and GroupBroken.
        """
        groups = sorted(groups, key=lambda group: group.prompt_index)
        (values, metrics), _ = self.replicas.together(
            lambda: self._advantages(iteration, groups, elsewhere or {})
        )
        rate = learning_rate(self.config.optimizer, self.done, self.config.iterations)
        # copied before the averages change it
        sampled_with = (
            adapter_state(self.transformer, self.objective.sampling_adapter)
            if PREVIOUS in self.adapters
            else None
        )
        try:
            samples, _ = self.replicas.together(
                lambda: joined(groups, values, self.config.seed, iteration, self.device)
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
        """Make the optimizer steps and move the averages that follow each step; all or nothing."""
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
        """Return (advantages float32 [K] of all replicas' prompts, by prompt index; metrics).

        Raises ValueError if the iteration or its groups cannot be trained on.
        """
        if self.last_iteration is not None and iteration <= self.last_iteration:
            raise ValueError(
                f"iteration {iteration} was trained already, the last one was"
                f" {self.last_iteration}: nothing may count twice"
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
        """Merge the sampling policy, or the adapter ``weights``, and pack it for rollout actors.

        ``backend`` is the one that the rollout actors reported: "auto" may choose another on their
        device than in this process. Raises NonFiniteWeights, which names the module, after saving
        the data of the iteration that caused it to ``failure_dir``, and ValueError for an arm that
        does not explore.
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
        """Save this replica's data of an iteration and the adapters; return where, or why not."""
        replica = f".replica-{self.replicas.rank}" if self.replicas.size > 1 else ""
        name = f"iteration_{iteration:06d}{replica}{ENDING}"
        path = self.failure_dir / name if self.failure_dir is not None else None
        metadata = {"iteration": str(iteration), "seed": str(self.config.seed), "reason": reason}
        return keep_evidence(path, groups, values, self._state.adapters(), metadata)

    def save(self, path: str | Path, extra_state: Tree) -> None:
        """Write a checkpoint directory atomically, and prune to ``checkpoint.keep_last``.

        ``extra_state`` is any tree that JSON can represent. Raises CheckpointError; existing
        checkpoints are intact then.
        """
        self._state.save(path, Counts(self.done, self.last_iteration), extra_state)

    def load(self, path: str | Path) -> Tree:
        """Restore a checkpoint bit by bit, and return its extra state.

        Raises CheckpointError before anything has changed.
        """
        counts, extra_state = self._state.load(path)
        self.done, self.last_iteration = counts
        self.generator.updates = self.done
        return extra_state
