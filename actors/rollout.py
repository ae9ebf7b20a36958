"""The rollout service: quantised denoisers that turn seeds into proxy pictures."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from actors.messages import ExploreChunk, Explored
from actors.runtime import begin, identity
from policy.explorer import Explorer
from policy.families import family_for
from policy.precision.backends import Backend, available_backends, eager_note, resolve_backend
from policy.precision.counting import configured_step
from policy.types import Conditioning


class RolloutActor:
    """An explorer with the version of weights that it was last given; it refuses work while it has
    none.
    """

    def __init__(self, config: dict[str, Any]):
        self._run, _, self._device = begin(config, "rollout")
        exploration = self._run.plan.explore
        if exploration is None:
            raise RuntimeError(
                f"arm {self._run.arm!r} explores nothing: it needs no rollout actors"
            )
        self._own, why = resolve_backend(
            exploration.backend,
            self._device,
            compile=self._run.explore.compile,
            step=lambda backend: configured_step(self._run, backend),
        )
        self._why = why + eager_note(self._own, self._device, self._run.explore.compile)
        self._explorer: Explorer | None = self._build(self._own)

    def _build(self, backend: Backend) -> Explorer:
        import torch

        run = self._run
        return Explorer(
            family_for(run.model),
            backend,
            run.explore.keep_wide,
            self._device,
            torch.float32 if run.regenerate.precision == "fp32" else torch.bfloat16,
            activation_amax=run.explore.activation_amax,
            compile=run.explore.compile,
        )

    def ready(self) -> dict[str, Any]:
        """Who this is, which precision backend it runs and why, all that it could run, and whether
        its first chunk takes longer.
        """
        runs = available_backends(self._device)
        return identity(
            backend=self._own.name, why=self._why, runs=runs, cold=self._run.explore.compile
        )

    def load(self, backend: str | None, manifest: Any, *chunks: np.ndarray) -> tuple[int, str]:
        """Copy published weights in place; returns (version, checksum) as the acknowledgement.

        ``backend`` is the one they are for, None the configured one; where another runs here the
        denoiser is made anew.
        """
        wanted = self._own if backend is None else resolve_backend(backend, self._device)[0]
        if self._explorer is None or self._explorer.backend.name != wanted.name:
            self._explorer = None  # two would need the memory of both
            self._explorer = self._build(wanted)
        return self._explorer.load(manifest, list(chunks))

    def explore(
        self, request: ExploreChunk, conditioning: Conditioning
    ) -> tuple[Explored, np.ndarray, dict[str, np.ndarray] | None]:
        """(meta, images uint8 [B, 3, H, W], the samples as a record, "latents" float32 [B, ...], or
        None).

        Raises:
            RuntimeError: the weights here are not the version that the chunk asks for.
        """
        explorer = self._explorer
        version = explorer.version if explorer else None
        if explorer is None or version != request.key.version:
            raise RuntimeError(
                f"{request.key} asks for version {request.key.version}, this explorer has {version}"
            )
        start = time.perf_counter()
        images, latents = explorer.explore(
            conditioning, request.seeds, request.steps, request.solver
        )
        meta = Explored(request.key, len(images), time.perf_counter() - start)
        return meta, images, {"latents": latents} if request.return_latents else None
