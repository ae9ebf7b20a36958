"""The rollout service: quantised denoisers that turn seeds into proxy pictures."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from actors.messages import ExploreChunk, Explored
from actors.runtime import begin, identity
from policy.explorer import Explorer
from policy.families import family_for
from policy.precision.backends import resolve_backend
from policy.types import Conditioning


class RolloutActor:
    """An explorer with the version of weights that it was last given; it refuses work while it has none."""

    def __init__(self, config: dict[str, Any]):
        run, _, device = begin(config, "rollout")
        import torch

        exploration = run.plan.explore
        if exploration is None:
            raise RuntimeError(f"arm {run.arm!r} explores nothing: it needs no rollout actors")
        backend, self._why = resolve_backend(exploration.backend, device)
        dtype = torch.float32 if run.regenerate.precision == "fp32" else torch.bfloat16
        self._backend = backend.name
        self._compiles = run.explore.compile
        self._explorer = Explorer(
            family_for(run.model),
            backend,
            run.explore.keep_wide,
            device,
            dtype,
            activation_amax=run.explore.activation_amax,
            compile=self._compiles,
        )

    def ready(self) -> dict[str, Any]:
        """Who this is, which precision backend it runs and why, and whether its first chunk will take longer."""
        return identity(backend=self._backend, why=self._why, cold=self._compiles)

    def load(self, manifest: Any, *chunks: np.ndarray) -> tuple[int, str]:
        """Copy published weights in place; returns (version, checksum) as the acknowledgement."""
        return self._explorer.load(manifest, list(chunks))

    def explore(
        self, request: ExploreChunk, conditioning: Conditioning
    ) -> tuple[Explored, np.ndarray, dict[str, np.ndarray] | None]:
        """(meta, images uint8 [B, 3, H, W], the samples as a record, "latents" float32 [B, ...], or None).

        Raises:
            RuntimeError: the weights here are not the version that the chunk asks for.
        """
        if self._explorer.version != request.key.version:
            raise RuntimeError(f"{request.key} asks for version {request.key.version}, this explorer has {self._explorer.version}")
        start = time.perf_counter()
        images, latents = self._explorer.explore(conditioning, request.seeds, request.steps, request.solver)
        meta = Explored(request.key, len(images), time.perf_counter() - start)
        return meta, images, {"latents": latents} if request.return_latents else None
