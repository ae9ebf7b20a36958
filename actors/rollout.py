"""The rollout service: generates proxy images of seeds with a quantized denoiser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actors.messages import (
    ActorInfo,
    ExploreChunk,
    Images,
    Moved,
    Probe,
    ProbeResult,
    Samples,
    Shard,
    WeightsId,
)
from actors.runtime import identity, load_config, on_device, setup_torch
from actors.turns import Turn
from configs.section import Tree
from policy.decoders import load_decoder
from policy.explorer import Explorer
from policy.families import family_for
from policy.precision.backends import Backend, available_backends, eager_note, resolve_backend
from policy.precision.compiling import computing
from policy.precision.counting import configured_step
from policy.precision.manifest import Manifest
from policy.sampling.guidance import Guided
from policy.sampling.paths import explored_paths
from policy.types import DTYPES, Conditioning


@on_device("rollout", "explore.chunk_size")
class RolloutActor:
    """Actor that explores with the weights it loaded last; it raises before the first load."""

    def __init__(self, tree: Tree):
        self._run = load_config(tree)
        self._device = setup_torch(self._run, "rollout")
        exploration = self._run.plan.explore
        if exploration is None:
            raise RuntimeError(
                f"arm {self._run.arm!r} explores nothing and must not start rollout actors"
            )
        self._guided = Guided.at(self._run.guidance, exploration.guidance)
        self._own, why = resolve_backend(
            exploration.backend,
            self._device,
            compile=self._run.explore.compile,
            step=lambda backend: configured_step(self._run, backend),
            quantized=self._run.lora.base != "full",
        )
        self._why = why + eager_note(self._own, self._device, self._run.explore.compile)
        self._turn = Turn("a rollout actor", self._run.services, self._device)
        self._explorer: Explorer | None = self._build(self._own)

    def _build(self, backend: Backend) -> Explorer:
        run = self._run
        smaller = run.explored_model != run.model
        family = family_for(run.explored_model)
        leaves = run.services.rollout.between_turns == "host"
        return Explorer(
            family,
            backend,
            run.explore.modules_to_not_convert,
            self._device,
            DTYPES[run.regenerate.precision],
            activation_amax=run.explore.activation_amax,
            compile=run.explore.compile,
            trained=run.lora.targets or family.lora_targets,
            full=family_for(run.model) if smaller else None,
            vae=load_decoder(run, family, self._device, on_host=leaves),
            offload=leaves,
        )

    def ready(self) -> ActorInfo:
        """Describe the actor, its precision with the reason, and the other possible precisions."""
        runs, cold = available_backends(self._device), self._run.explore.compile
        who = identity(self._device)
        return replace(who, backend=self._own.name, why=self._why, runs=runs, cold=cold)

    def begin_turn(self) -> Moved:
        """Bring the weights back to the GPU."""
        return self._turn.begin(self._explorer.offload if self._explorer else None)

    def end_turn(self) -> Moved:
        """Leave the GPU to the learner."""
        return self._turn.end(self._explorer.offload if self._explorer else None)

    def load(
        self, backend: str | None, manifest: Manifest, sent: Sequence[int], *shards: Shard
    ) -> WeightsId:
        """Copy published weights in place; return what is loaded, as the acknowledgement.

        ``shards`` are those with the indices ``sent``; the actor has the others from the previous
        version. ``backend`` is the precision they are packed for, None the configured one; if the
        actor runs another one, it builds its denoiser again.
        """
        self._turn.require("load weights")
        requested = self._own if backend is None else resolve_backend(backend, self._device)[0]
        if self._explorer is None or self._explorer.backend.name != requested.name:
            self._explorer = None  # free the old one first: there may not be memory for both
            self._explorer = self._build(requested)
            # a new denoiser starts in host memory, but it is this actor's turn
            self._turn.begin(self._explorer.offload)
        received = dict(zip(sent, shards, strict=True))
        all_shards = [received.get(index) for index in range(len(manifest.shard_sizes))]
        return WeightsId(*self._explorer.load(manifest, all_shards), backend)

    def explore(
        self, request: ExploreChunk, conditioning: Conditioning
    ) -> tuple[float | None, Images, Samples]:
        """Generate the images of a chunk; return (``Explored.saturated``, images, samples).

        Samples contain "latents" float32 [B, *latent] if requested, else nothing.

        Raises:
            RuntimeError: the loaded weights are not the version that the chunk requires.
        """
        explorer = self._explorer_of(request.key.version, str(request.key))
        path = explored_paths(self._run, request.solver, request.key.iteration)
        images, latents = explorer.explore(
            conditioning,
            request.seeds,
            request.steps,
            request.solver,
            self._guided,
            path=path,
            start=request.start,
        )
        samples = {"latents": latents} if request.return_latents else {}
        return explorer.saturated, images, samples

    def probe(self, request: Probe, conditioning: Conditioning) -> ProbeResult:
        """Generate latents of the first seed, to be compared with those of the learner.

        With compiled blocks they are generated twice: eagerly, as by the learner, and compiled in a
        batch of all seeds, the batch size for which blocks are compiled.

        Raises:
            RuntimeError: the loaded weights are not the requested version.
        """
        explorer = self._explorer_of(request.version, "the identity check")
        compiles, compiled = self._run.explore.compile, None
        how = (request.steps, request.solver, self._guided)
        latents = explorer.latents(conditioning, request.seeds[:1], *how, eager=compiles)
        if compiles:
            compiled = explorer.latents(conditioning, request.seeds, *how)[:1].numpy()
        kind = computing(self._device, explorer.backend.name)
        return ProbeResult(latents.numpy(), kind, compiled=compiled)

    def _explorer_of(self, version: int, who: str) -> Explorer:
        """Return the explorer if it has ``version``; ``who`` names the caller in the error."""
        self._turn.require(f"explore for {who}")
        explorer = self._explorer
        held = explorer.version if explorer else None
        if explorer is None or held != version:
            raise RuntimeError(f"{who} needs version {version}, but this rollout actor has {held}")
        return explorer
