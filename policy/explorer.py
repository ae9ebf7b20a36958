"""The exploring side of the policy: a quantized denoiser with published weights, an autoencoder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from policy.decoders import decoder_on
from policy.families.base import Family
from policy.lora import target_modules
from policy.offload import Offload, frozen_tensors
from policy.precision.backends import Backend
from policy.precision.compiling import compile_failures, compiled
from policy.precision.manifest import Manifest, WireError
from policy.precision.swap import ModuleRow, quantize_plan, swap_linears
from policy.precision.wire import unpack_into
from policy.sampling.guidance import Guided
from policy.sampling.paths import PathPlan, sample_ends
from policy.sampling.sample import sample
from policy.types import Conditioning


class PackedPolicy:
    """A denoiser that runs on published weights: quantized layers in place of its linears.

    Quantized linears hold their packed weights only: the unquantized ones are dropped, module by
    module, before anything moves to ``device``, which may have no room for them. ``plan`` is the
    table of what runs quantized.
    """

    def __init__(
        self,
        family: Family,
        backend: Backend,
        transformer: nn.Module,
        modules_to_not_convert: Sequence[str] = (),
        device: torch.device | str = "cpu",
        activation_amax: str = "power_of_two",
        compile: bool = False,
        trained: Sequence[str] | None = None,
        full: Family | None = None,
        offload: bool = False,
    ) -> None:
        """``transformer`` has no adapters; its linears are replaced.

        ``full``: the same model at full size, whose initial noises are cut down to this size.
        ``trained``: suffixes of the modules whose weights must come with every version; None: what
        comes is taken. ``compile`` and ``activation_amax`` as in ``Explorer``. ``offload``: the
        transformer stays in host memory, and the caller moves it.
        """
        self.family, self.backend, self.device = family, backend, torch.device(device)
        self.full = full
        self.transformer = transformer
        self._trained = set(target_modules(transformer, trained) if trained else ())
        self.plan: list[ModuleRow] = quantize_plan(
            transformer, family, modules_to_not_convert, backend
        )
        self._layers = swap_linears(transformer, self.plan, backend, activation_amax)
        if not offload:
            transformer.to(self.device)
        self._denoiser = (
            compiled(transformer, self.device, "explore.compile") if compile else transformer
        )
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
        """The tensors that the manifest's entries fill: quantized layers, unquantized weights."""
        targets = {
            f"{name}.{part}": buffer
            for name, layer in self._layers.items()
            for part, buffer in layer.wire_targets().items()
        }
        unquantized = {f"{row.name}.weight" for row in self.plan if not row.quantized}
        for entry in manifest.entries:
            if entry.name in unquantized:
                targets[entry.name] = self.transformer.get_parameter(entry.name)
        # a trained module that did not come would go on with the weights of the base model
        for name in self._trained:
            if (weight := f"{name}.weight") in unquantized:
                targets[weight] = self.transformer.get_parameter(weight)
        return targets

    @torch.no_grad()
    def latents(
        self,
        cond: Conditioning,
        seeds: Sequence[int],
        steps: int,
        solver: str,
        guided: Guided | None = None,
        upto: int | None = None,
        path: PathPlan | None = None,
        start: int | None = None,
        eager: bool = False,
    ) -> Tensor:
        """Float32 [B, *latent] on the CPU, of one prompt at B seeds.

        ``cond`` has one row; the seeds are one batch; ``upto`` as in ``sample``. With ``path`` they
        are what its paths end in, and ``solver`` is the path's; ``start`` as in ``sample_ends``.
        ``eager``: without the graphs of ``compile``.
        Raises RuntimeError while there is no version, CompileFailed where ``compile`` does not
        work.
        """
        if self._loaded is None:
            raise RuntimeError("this explorer has no policy version: load published weights first")
        if len(cond) != 1:
            raise ValueError(
                f"conditioning of {len(cond)} rows: explore takes one prompt at a time"
            )
        with compile_failures("explore.compile"):
            denoiser = self.transformer if eager else self._denoiser
            asked = (self.family, denoiser, cond.repeat(len(seeds)), seeds)
            if path is None:
                latents = sample(*asked, steps, solver, guided=guided, full=self.full, upto=upto)
            else:
                latents = sample_ends(*asked, path, steps, start, guided)
        if not bool(torch.isfinite(latents).all()):
            raise RuntimeError(
                f"policy version {self.version} gave latents that are not finite: lower"
                " optimizer.lr and resume"
            )
        return latents


class Explorer(PackedPolicy):
    """Makes proxy images with the policy version it was last given. Holds no text encoder."""

    def __init__(
        self,
        family: Family,
        backend: Backend,
        modules_to_not_convert: Sequence[str] = (),
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        activation_amax: str = "power_of_two",
        compile: bool = False,
        trained: Sequence[str] | None = None,
        full: Family | None = None,
        vae: nn.Module | None = None,
        offload: bool = False,
    ) -> None:
        """``dtype`` is that of the unquantized parts, unless the backend has one of its own.
        ``vae`` decodes the images; None: the model's own, in FP32.

        ``compile``: the first call at each batch size compiles the transformer, on a GPU the
        decoder too, which takes up to a minute at real size; ValueError where nothing can be
        compiled. ``activation_amax`` as in ``Backend.replacements``, ``trained`` and ``full`` as in
        ``PackedPolicy``.

        ``offload``: denoiser and decoder begin in host memory, and ``offload.back`` brings them to
        ``device``, for as long as this is to be used.
        """
        transformer = family.load_transformer("cpu", backend.dtype or dtype)
        super().__init__(
            family,
            backend,
            transformer,
            modules_to_not_convert,
            device,
            activation_amax,
            compile,
            trained,
            full,
            offload,
        )
        home = torch.device("cpu") if offload else self.device
        self.vae = vae if vae is not None else family.load_vae(home, torch.float32)
        self._decoder = decoder_on(self.device, self.vae, compile)
        moving = frozen_tensors(transformer, self.vae)
        self.offload = Offload(moving, self.device) if offload else None

    def explore(
        self,
        cond: Conditioning,
        seeds: Sequence[int],
        steps: int,
        solver: str,
        guided: Guided | None = None,
        upto: int | None = None,
        path: PathPlan | None = None,
        start: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(images of ``Family.decode``, latents float32 [B, *latent]) of one prompt at B seeds.

        As ``latents``, decoded.
        """
        latents = self.latents(cond, seeds, steps, solver, guided, upto, path, start)
        with torch.no_grad(), compile_failures("explore.compile"):
            images = self.family.decode(self._decoder, latents)
        return images.numpy(), latents.numpy()
