"""What a family of text-to-image models says about itself; outside of it sigma is in [0, 1]."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from configs.sections import Guidance, Model
from configs.sources import Pixels
from policy.families.files import SHAPES_DECODER
from policy.families.pipeline import Diffusers, Pipeline
from policy.families.text import PromptEncoder
from policy.types import Conditioning

Scale = float | Tensor


class Family(Pipeline, ABC):
    """One model of one family. Holds configuration; the ``load_*`` methods load weights.

    ``modules_to_not_convert`` are fnmatch patterns of modules that are never quantized; ``trained``
    are last names of the paths of linears that are trained, ``*`` standing for anything; each row
    of ``fuse`` names linears of one block that read the same input and may run as one.
    ``tiny_decoder`` is the hub id of a published AutoencoderTiny of its latents. ``video``: it
    draws clips of ``model.frames`` frames. ``edits``: every prompt has a source image. ``native``:
    it reads weights in the form of the model's own code, ``model.native_path``.
    """

    modules_to_not_convert: tuple[str, ...]
    trained: tuple[str, ...] = ()
    fuse: tuple[tuple[str, ...], ...] = ()
    tiny_decoder: str | None = None
    video: bool = False
    edits: bool = False
    native: bool = False

    def __init__(self, model: Model) -> None:
        """Raises as ``Pipeline``, and ValueError for frames of a model that draws images, and for
        ``native_path`` of one that reads no such file.
        """
        for key in ("frames", "fps"):
            if getattr(model, key) is not None and not self.video:
                raise ValueError(
                    f"model.{key}: family {self.name!r} draws images, not clips: leave it out"
                )
        if model.native_path is not None and not self.native:
            raise ValueError(
                f"model.native_path: {model.native_path!r}: family {self.name!r} reads no such"
                " files: leave it out"
            )
        if model.path == "shapes":
            self.tiny_decoder = str(SHAPES_DECODER)
        super().__init__(model)

    def check(self, guidance: Guidance | None = None, sharded: bool = False) -> None:
        """Checks ``[model]`` and ``[guidance]`` by configuration files; ``sharded``: learner
        replicas are to share the frozen weights.

        Raises FileNotFoundError or ValueError.
        """
        assert self.latent_shape
        alone = self.boundary is None
        if sharded and not alone:
            # every pass takes all replicas, and they would have to ask the same transformer
            raise ValueError(
                f"services.learner.shard: 'base' with {self.directory!r}, which has two"
                " transformers: use lora.base = 'int8' or 'nf4', or shard = 'none'"
            )
        if guidance is not None and guidance.low_noise is not None and alone:
            raise ValueError(
                f"guidance.low_noise: {self.directory!r} has one transformer for all noise levels:"
                " leave it out"
            )
        if guidance is not None and self.distilled:
            for stage in guidance.stages:
                raise ValueError(
                    f"guidance.{stage}: {self.directory!r} is distilled, and draws without"
                    " classifier-free guidance: leave [guidance] out"
                )
        if self.model.guidance is not None and not self.embeds_guidance:
            raise ValueError(
                f"model.guidance: {self.directory!r} has no guidance embedding: leave"
                " model.guidance out"
            )
        if self.model.guidance is None and self.embeds_guidance:
            raise ValueError(
                f"model.guidance: {self.directory!r} was distilled with an embedded guidance: give"
                " one, such as 3.5"
            )

    @property
    def distilled(self) -> bool:
        """Whether the files say that classifier-free guidance was distilled away."""
        return self.embeds_guidance

    @property
    def embeds_guidance(self) -> bool:
        """Whether the transformer takes a guidance strength, which is not classifier-free."""
        return bool(self.part_config("transformer").get("guidance_embeds", False))

    @property
    def factor(self) -> int:
        """Pixels per side of a latent pixel, f."""
        return 2 ** (len(self.part_config("vae")["block_out_channels"]) - 1)

    def sizes(self, unit: int, largest: int | None = None) -> tuple[int, int]:
        """(height, width) in pixels: multiples of ``unit`` up to ``largest``, or ValueError."""
        for key, pixels in (("height", self.model.height), ("width", self.model.width)):
            if pixels % unit or (largest is not None and pixels > largest):
                limit = f" up to {largest}" if largest is not None else ""
                raise ValueError(
                    f"model.{key}: {pixels} pixels; this model makes multiples of {unit}{limit}"
                )
        return self.model.height, self.model.width

    def load_text(
        self, device: torch.device | str, dtype: torch.dtype, negative: str | None = None
    ) -> PromptEncoder:
        """Text encoders and tokenizers, nothing else but the autoencoder of a family that edits;
        ``negative`` as in ``PromptEncoder``.
        """
        # None: diffusers then reads no file of that part
        parts: dict[str, Diffusers] = dict.fromkeys((*self.transformers, "vae"))
        for part in self.components:
            if part.startswith("text_encoder") or (self.edits and part == "vae"):
                library, name = self.index[part]
                kind = getattr(importlib.import_module(library), name)
                parts[part] = self._whole(part, kind, dtype)
        pipe = self._pretrained(self.stock, "the text encoders", **parts, dtype=dtype)
        encode = self.encode_edit if self.edits else self.encode_prompt
        return PromptEncoder(pipe, encode, device, self.model.text_offload, negative)

    @torch.no_grad()
    def decode(self, vae: Diffusers, latents: Tensor, batch_size: int | None = None) -> Tensor:
        """Images of latents [B, *latent]: uint8 [B, 3, H, W], clips [B, F, 3, H, W], on the CPU.

        As the stock pipelines decode: unscale, decode, [-1, 1] to [0, 255], round half to even.
        Clips one at a time, as a batch of them takes more memory than any denoiser.
        """
        images, size = [], 1 if self.video else batch_size or max(len(latents), 1)
        for rows in latents.split(size):
            image = self.pixels(vae, rows.to(vae.device, vae.dtype)).float()
            images.append((image * 0.5 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8).cpu())
        return torch.cat(images)

    def pixels(self, vae: Diffusers, latents: Tensor) -> Tensor:
        """Decoded images in [-1, 1], [B, 3, H, W] or [B, F, 3, H, W], of latents [B, *latent]."""
        return vae.decode(self.unscale(vae, latents), return_dict=False)[0]

    def spatial(self, latents: Tensor) -> Tensor:
        """Latents [B, *latent] as [B, C, H/f, W/f], a channel per channel of the autoencoder."""
        return latents

    def packed(self, spatial: Tensor) -> Tensor:
        """The inverse of ``spatial``."""
        return spatial

    def smaller_noise(self, noise: Tensor, smaller: Family) -> Tensor:
        """Initial noise [B, *latent] for the same model at a smaller size: [B, *smaller latent].

        Means of blocks times the root of their size: standard normal again, and what of the noise
        is as coarse as the smaller latents is the same.
        """
        rows = self.model.height // smaller.model.height
        columns = self.model.width // smaller.model.width
        # over latent pixels side by side in the image: packed latents have them elsewhere
        pooled = torch.nn.functional.avg_pool2d(self.spatial(noise), (rows, columns))
        return smaller.packed(pooled * (rows * columns) ** 0.5)

    def guidance_input(self, x: Tensor) -> Tensor | None:
        """The embedded guidance, float32 [B], for x [B, *latent]; None where there is no input."""
        if not self.embeds_guidance:
            return None
        if self.model.guidance is None:
            self.check()
        strength = self.model.guidance or 0.0
        # in FP32 whatever the transformer computes in, as the pipelines make it
        return torch.full([1], strength, device=x.device, dtype=torch.float32).expand(len(x))

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """``trained``, of this model: a family may know more by its configuration files."""
        return self.trained

    @property
    @abstractmethod
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one latent, without the batch dimension.

        Raises ValueError for an image size that the model cannot make.
        """

    @property
    @abstractmethod
    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what ``encode_prompt`` gives for one prompt, every token in use."""

    @property
    def text_tokens(self) -> int:
        """Most tokens of a prompt that a text encoder reads, those of its source image among
        them.
        """
        return self.model.max_sequence_length

    @property
    def source_patches(self) -> int:
        """Patches of a source image that a text encoder looks at."""
        return 0

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Shape of a source image as the autoencoder encodes it, without the batch dimension."""
        return (3, self.model.height, self.model.width)

    @abstractmethod
    def encode_prompt(self, pipe: Diffusers, prompt: str) -> Conditioning:
        """One row of conditioning from ``pipe``, which has no transformer and no autoencoder."""

    def encode_edit(self, pipe: Diffusers, prompt: str, image: Pixels) -> Conditioning:
        """The same of a prompt and the image uint8 [3, H, W] that it edits, where the family
        ``edits``; ``pipe`` has the autoencoder.
        """
        raise NotImplementedError(f"family {self.name!r} edits no images")

    @abstractmethod
    def sigmas(self, steps: int) -> Tensor:
        """The sampling schedule: float32 [steps + 1] on the CPU, strictly descending, last 0."""

    @abstractmethod
    def velocity(
        self, transformer: Diffusers, x: Tensor, sigma: Tensor, cond: Conditioning
    ) -> Tensor:
        """v = eps - x0 [B, *latent] for x [B, *latent], sigma 0-dim or [B], cond of B rows.

        float32; float64 only where the transformer itself is.
        """

    @classmethod
    def call_arguments(cls, model: Model, guidance: Guidance) -> dict[str, object]:
        """What the stock pipeline is called with to draw as an evaluation does, but its solver."""
        return {
            **cls.guidance_arguments(model, guidance),
            "height": model.height,
            "width": model.width,
            "max_sequence_length": model.max_sequence_length,
        }

    @classmethod
    def guidance_arguments(cls, model: Model, guidance: Guidance) -> dict[str, object]:
        """Guidance of an evaluation in the words of the stock pipeline."""
        negative = {"negative_prompt": guidance.negative_prompt} if guidance.evaluate != 1 else {}
        return {"guidance_scale": guidance.evaluate, **negative}

    def guidance_scale(self, sigma: Tensor, scale: float, low_noise: float | None) -> Scale:
        """The scale at sigma, 0-dim or [B], where ``low_noise`` is that of the second of two
        transformers; a tensor broadcasts to [B, *latent].
        """
        return scale

    def guided(self, along: Tensor, against: Tensor, scale: Scale) -> Tensor:
        """Classifier-free guidance of the prompt's velocity against the negative prompt's."""
        return against + scale * (along - against)

    def unscale(self, vae: Diffusers, latents: Tensor) -> Tensor:
        """Latents [B, *latent] as the autoencoder's decoder takes them: often [B, C, H/f, W/f]."""
        return self.spatial(latents) / vae.config.scaling_factor + vae.config.shift_factor


def widened(velocity: Tensor) -> Tensor:
    """float32 of a narrower velocity; float64 stays."""
    return velocity if velocity.dtype == torch.float64 else velocity.float()
