"""Export of the sampling policy in the rollout actors' format: choice of backend, and packing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch
from torch import nn

from configs.schema import RunConfig
from learner.identity import ProbeInputs, recompute
from learner.publish import Export, Publisher
from policy.families import Family
from policy.precision.backends import Backend, packing_backend
from policy.precision.swap import ModuleRow, quantize_plan
from policy.sampling.guidance import Guided
from policy.types import Conditioning


class PolicyExporter:
    """Merges an adapter of the learner's transformer into its weights and packs them."""

    def __init__(
        self, config: RunConfig, family: Family, transformer: nn.Module, device: torch.device
    ) -> None:
        self.config, self.family, self.device = config, family, device
        self.transformer = transformer
        self._backend: Backend | None = None
        self._publisher: Publisher | None = None
        self._rows: list[ModuleRow] = []
        self._exported: Export | None = None

    @property
    def table(self) -> list[dict[str, object]]:
        """A row (name, shape, quantized, why, backend) per module with a weight matrix.

        It is for the backend in use, and empty for arms that do not explore.
        """
        if not self.config.plan.explore:
            return []
        backend = self._chosen(None)
        return [{**asdict(row), "backend": backend.name} for row in self._rows]

    def export(self, adapter: str, version: int, backend: str | None = None) -> Export:
        """Merge ``adapter`` and pack it for ``backend``; None: the last, or the configured one.

        Raises NonFiniteWeights with the module's name, and ValueError for an arm that does not
        explore.
        """
        chosen, explore = self._chosen(backend), self.config.explore
        if self._publisher is None:
            self._publisher = Publisher(
                self.transformer,
                self._rows,
                chosen,
                self.config.publish.shard_mb * 2**20,
                explore.scale_search,
                explore.frozen_amax,
            )
        self._exported = self._publisher.export(adapter, version)
        return self._exported

    def probe(
        self, cond: Conditioning, version: int, seeds: Sequence[int], steps: int, solver: str
    ) -> tuple[np.ndarray, str, float]:
        """Generate a few seeds with the packed weights of the last export on this device.

        Returns (latents float32 [B, *latent], kind of arithmetic, bound) as ``recompute`` of
        ``learner.identity``. Raises ValueError if the last export was another version.
        """
        if self._exported is None or self._exported[0].version != version or not self._backend:
            raise ValueError(f"version {version} is not the one that was exported last")
        manifest, shards, _ = self._exported
        return recompute(
            self.config, self.family, self.transformer, self._backend, self.device,
            manifest, shards, ProbeInputs(cond, seeds, steps, solver, self._guided()),
        )  # fmt: skip

    def _guided(self) -> Guided | None:
        explored = self.config.plan.explore
        return Guided.at(self.config.guidance, explored.guidance) if explored else None

    def _chosen(self, backend: str | None) -> Backend:
        """Return the rollout actors' backend; switch to ``backend`` if it is not None."""
        plan = self.config.plan.explore
        if plan is None:
            raise ValueError(
                f"arm {self.config.arm!r} explores nothing, so no weights are exported"
            )
        if self._backend is None:
            # a guess until rollout actors report their choice: that on a GPU if there is one here
            on_gpu = self.config.services.rollout.gpus and torch.cuda.is_available()
            packed_base = self.config.lora.base != "full"
            self._use(packing_backend(plan.backend, "cuda" if on_gpu else "cpu", packed_base))
        if backend is not None and self._backend is not None and backend != self._backend.name:
            self._use(packing_backend(backend, self.device))
        assert self._backend is not None
        return self._backend

    def _use(self, backend: Backend) -> None:
        if self.config.lora.base != "full" and not backend.quantizes:
            raise ValueError(
                f"lora.base = {self.config.lora.base!r}: exploring in {backend.name} would not use"
                " the quantized base that is trained: use a backend that quantizes, or 'full'"
            )
        unquantized = self.config.explore.modules_to_not_convert
        self._rows = quantize_plan(self.transformer, self.family, unquantized, backend)
        # a new publisher, because statistics compare exports of one format only
        self._backend, self._publisher = backend, None
