"""The exploring side of the policy: a quantized denoiser with published weights, and a decoder."""

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
from policy.precision.history import pass_counters
from policy.precision.manifest import Manifest, WireError
from policy.precision.swap import ModuleRow, quantize_plan, swap_linears
from policy.precision.wire import unpack_into
from policy.sampling.guidance import Guided
from policy.sampling.paths import PathPlan, sample_ends
from policy.sampling.sample import sample
from policy.types import Conditioning


class PackedPolicy:
    """A denoiser with quantized layers in place of its linears, which runs on published weights.

    Quantized linears hold only their packed weights. The unquantized weights are freed module by
    module before anything moves to ``device``, which may not have enough memory for them. ``plan``
    lists which modules run quantized.
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
        """Quantize ``transformer``, which has no adapters, in place.

        ``full`` is the same model at full size; its initial noises are reduced to this size.
        ``trained`` are suffixes of the modules whose weights every version must contain; None
        accepts any set. ``compile`` and ``activation_amax`` are as in ``Explorer``. With
        ``offload`` the transformer stays in host memory, and the caller moves it.
        """
        self.family, self.backend, self.device = family, backend, torch.device(device)
        self.full = full
        self.transformer = transformer
        self._trained = set(target_modules(transformer, trained) if trained else ())
        self.plan: list[ModuleRow] = quantize_plan(
            transformer, family, modules_to_not_convert, backend
        )
        self._layers = swap_linears(transformer, self.plan, backend, activation_amax)
        self._counters = pass_counters(transformer)
        if not offload:
            transformer.to(self.device)
        self._denoiser = (
            compiled(transformer, self.device, "explore.compile") if compile else transformer
        )
        self._loaded: Manifest | None = None
        self.saturated: float | None = None
        """Share of the last sampling's activations, per layer and pass, that exceeded the amax they
        were packed by; None if each is packed by its own."""

    @property
    def version(self) -> int | None:
        """The loaded policy version; None before the first load and after a failed one."""
        return self._loaded.version if self._loaded else None

    def load(self, manifest: Manifest, shards: Sequence[np.ndarray | None]) -> tuple[int, str]:
        """Copy published weights in place; return (version, checksum) as the acknowledgement.

        A shard is None if the previous load already contained it. Raises WireError if the weights
        are damaged or do not fit this model and backend; ``version`` is then None until the next
        load succeeds.
        """
        before, self._loaded = self._loaded, None
        if manifest.format != self.backend.wire_format:
            raise WireError(
                f"version {manifest.version} is {manifest.format}, but backend {self.backend.name}"
                f" needs {self.backend.wire_format}"
            )
        unpack_into(manifest, shards, self._targets(manifest), before)
        for layer in self._layers.values():
            layer.finish_loading()  # only when all layers are filled: fused groups need all members
        self._loaded = manifest
        return manifest.version, manifest.checksum

    def _targets(self, manifest: Manifest) -> dict[str, Tensor]:
        """Return the tensors to fill: buffers of quantized layers, and unquantized weights."""
        targets = {
            f"{name}.{part}": buffer
            for name, layer in self._layers.items()
            for part, buffer in layer.wire_targets().items()
        }
        unquantized = {f"{row.name}.weight" for row in self.plan if not row.quantized}
        for entry in manifest.entries:
            if entry.name in unquantized:
                targets[entry.name] = self.transformer.get_parameter(entry.name)
        # required even if the manifest lacks it: without an error, a trained module that was not
        # published would keep the weights of the base model
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
        stop_after: int | None = None,
        path: PathPlan | None = None,
        start: int | None = None,
        eager: bool = False,
    ) -> Tensor:
        """Sample the latents of one prompt at B seeds: float32 [B, *latent] on the CPU.

        ``cond`` has one row, and all seeds are sampled in one batch. ``stop_after`` is as in
        ``sample``. With ``path`` the latents are the ends of its paths and its solver is used
        instead of ``solver``; ``start`` is as in ``sample_ends``. ``eager`` bypasses the compiled
        graphs.
        Raises RuntimeError if no version is loaded or the latents are not finite, ValueError if
        ``cond`` has more than one row, and CompileFailed if compilation fails.
        """
        if self._loaded is None:
            raise RuntimeError("no policy version is loaded: load published weights first")
        if len(cond) != 1:
            raise ValueError(
                f"conditioning of {len(cond)} rows: explore accepts one prompt at a time"
            )
        for counter in self._counters:
            counter.reset()
        with compile_failures("explore.compile"):
            denoiser = self.transformer if eager else self._denoiser
            inputs = (self.family, denoiser, cond.repeat(len(seeds)), seeds)
            if path is None:
                latents = sample(
                    *inputs, steps, solver, guided=guided, full=self.full, stop_after=stop_after
                )
            else:
                latents = sample_ends(*inputs, path, steps, start, guided)
        counts = [counter.end() for counter in self._counters]
        packed = sum(inputs for _, inputs in counts)
        self.saturated = sum(found for found, _ in counts) / packed if packed else None
        if not bool(torch.isfinite(latents).all()):
            raise RuntimeError(
                f"policy version {self.version} produced latents that are not finite: lower"
                " optimizer.lr and continue with --resume"
            )
        return latents


class Explorer(PackedPolicy):
    """Generates proxy images with the policy version loaded last. Has no text encoder."""

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
        """Load the transformer of ``family`` and quantize it.

        ``dtype`` is the dtype of the unquantized parts, unless the backend has its own. ``vae``
        decodes the images; None means the model's own autoencoder in FP32.

        With ``compile`` the first call at each batch size compiles the transformer, and on a GPU
        the decoder too, which takes up to a minute for a model of real size. Raises ValueError if
        compilation is not possible. ``activation_amax`` is as in ``Backend.replacements``;
        ``trained`` and ``full`` are as in ``PackedPolicy``.

        With ``offload`` denoiser and decoder start in host memory; ``offload.to_device`` moves them
        to ``device`` before use.
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
        tensors = frozen_tensors(transformer, self.vae)
        self.offload = Offload(tensors, self.device) if offload else None

    def explore(
        self,
        cond: Conditioning,
        seeds: Sequence[int],
        steps: int,
        solver: str,
        guided: Guided | None = None,
        stop_after: int | None = None,
        path: PathPlan | None = None,
        start: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sample and decode one prompt at B seeds.

        Returns (images as from ``Family.decode``, latents float32 [B, *latent]). The arguments are
        those of ``latents``.
        """
        latents = self.latents(cond, seeds, steps, solver, guided, stop_after, path, start)
        with torch.no_grad(), compile_failures("explore.compile"):
            images = self.family.decode(self._decoder, latents)
        return images.numpy(), latents.numpy()
