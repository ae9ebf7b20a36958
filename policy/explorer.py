"""The exploring side of the policy: a quantised denoiser with published weights, an autoencoder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from policy.families.base import Family
from policy.precision.backends import Backend
from policy.precision.compiling import compile_failures, compiled
from policy.precision.swap import ModuleRow, quantise_plan, swap_linears
from policy.precision.wire import Manifest, WireError, unpack_into
from policy.sampling.guidance import Guided
from policy.sampling.sample import sample
from policy.types import Conditioning


class Explorer:
    """Makes proxy images with the policy version it was last given.

    Holds no text encoder. Quantised linears hold their packed weights only: the unquantized ones
    are dropped on the host, module by module, before anything moves to ``device``, which may have
    no room for them. ``plan`` is the table of what runs quantised.
    """

    def __init__(
        self,
        family: Family,
        backend: Backend,
        modules_to_not_convert: Sequence[str] = (),
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        activation_amax: str = "power_of_two",
        compile: bool = False,
        full: Family | None = None,
    ) -> None:
        """``full``, where images are smaller than those: whose initial noises are cut down.

        ``dtype`` is that of the unquantised parts, unless the backend has one of its own.

        ``compile``: the first call at each batch size compiles the transformer, which takes minutes
        at real size; ValueError where nothing can be compiled. ``activation_amax`` as in
        ``Backend.replacements``.
        """
        self.family, self.backend, self.device = family, backend, torch.device(device)
        self.full = full
        self.transformer = family.load_transformer("cpu", backend.dtype or dtype)
        self.plan: list[ModuleRow] = quantise_plan(
            self.transformer, family, modules_to_not_convert, backend
        )
        self._layers = swap_linears(self.transformer, self.plan, backend, activation_amax)
        self.transformer.to(self.device)
        self._denoiser = compiled(self.transformer, self.device) if compile else self.transformer
        self.vae = family.load_vae(self.device, torch.float32)
        self._loaded: Manifest | None = None

    @property
    def version(self) -> int | None:
        """The policy version in place; None before the first load and after a failed one."""
        return self._loaded.version if self._loaded else None

    def load(self, manifest: Manifest, shards: Sequence[np.ndarray | None]) -> tuple[int, str]:
        """Copy published weights in place; returns (version, checksum) as the acknowledgement.

        None stands for a shard that the last load has brought already. Raises WireError when they
        are damaged or made for something else; there is no version then, until the next load.
        """
        before, self._loaded = self._loaded, None
        if manifest.format != self.backend.wire_format:
            raise WireError(
                f"version {manifest.version} is {manifest.format}, backend {self.backend.name}"
                f" takes {self.backend.wire_format}"
            )
        unpack_into(manifest, shards, self._targets(manifest), before)
        for layer in self._layers.values():
            layer.arrived()  # once every layer is filled: some run as one
        self._loaded = manifest
        return manifest.version, manifest.checksum

    def _targets(self, manifest: Manifest) -> dict[str, Tensor]:
        """The tensors that the manifest's entries fill: quantised layers, unquantized weights."""
        targets = {
            f"{name}.{part}": buffer
            for name, layer in self._layers.items()
            for part, buffer in layer.wire_targets().items()
        }
        unquantized = {f"{row.name}.weight" for row in self.plan if not row.quantised}
        for entry in manifest.entries:
            if entry.name in unquantized:
                targets[entry.name] = self.transformer.get_parameter(entry.name)
        return targets

    @torch.no_grad()
    def explore(
        self,
        cond: Conditioning,
        seeds: Sequence[int],
        steps: int,
        solver: str,
        guided: Guided | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(images uint8 [B, 3, H, W], latents float32 [B, *latent]) of one prompt at B seeds.

        ``cond`` has one row; the seeds are one batch. Raises RuntimeError while there is no
        version, CompileFailed where ``compile`` does not work.
        """
        if self._loaded is None:
            raise RuntimeError("this explorer has no policy version: load published weights first")
        if len(cond) != 1:
            raise ValueError(
                f"conditioning of {len(cond)} rows: explore takes one prompt at a time"
            )
        with compile_failures("explore.compile"):
            rows = cond.repeat(len(seeds))
            latents = sample(
                self.family,
                self._denoiser,
                rows,
                seeds,
                steps,
                solver,
                guided=guided,
                full=self.full,
            )
        if not bool(torch.isfinite(latents).all()):
            raise RuntimeError(
                f"policy version {self.version} gave latents that are not finite: lower"
                " optimizer.lr and resume"
            )
        images = self.family.decode(self.vae, latents)
        return images.numpy(), latents.numpy()
