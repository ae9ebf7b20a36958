"""Base class of model families, which adapt one kind of diffusers pipeline to a policy.

Everywhere outside of a family sigma is in [0, 1].
"""

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
from policy.lora_files import in_diffusers
from policy.types import Conditioning

Scale = float | Tensor


class Family(Pipeline, ABC):
    """One model of one family. Holds configuration only; the ``load_*`` methods load weights.

    Class attributes that a family sets:

    * ``modules_to_not_convert``: fnmatch patterns of modules that are never quantized.
    * ``trained``: last names of the paths of trained linears; ``*`` matches anything.
    * ``fuse``: rows of linears of one block that read the same input and may run as one product.
    * ``tiny_decoder``: hub id of a published AutoencoderTiny for its latents.
    * ``own_statistics``: True if ``unscale`` needs statistics of the model's autoencoder, which an
      AutoencoderTiny does not have.
    * ``video``: True if it generates clips of ``model.frames`` frames.
    * ``edits``: True if every prompt has a source image.
    * ``rename_lora``: names of modules in an exported LoRA, which the stock pipeline must know.
    * ``comfyui``: True if ComfyUI knows these names.
    * ``native``: True if it can read weights in the format of the model's original code,
      ``model.native_path``.
    """

    modules_to_not_convert: tuple[str, ...]
    trained: tuple[str, ...] = ()
    fuse: tuple[tuple[str, ...], ...] = ()
    tiny_decoder: str | None = None
    own_statistics: bool = False
    video: bool = False
    edits: bool = False
    comfyui: bool = False
    rename_lora = staticmethod(in_diffusers)
    native: bool = False

    def __init__(self, model: Model) -> None:
        """Check and store ``model``.

        Raises the errors of ``Pipeline``, and ValueError for ``frames`` or ``fps`` of an image
        model and for ``native_path`` of a family that cannot read such files.
        """
        for key in ("frames", "fps"):
            if getattr(model, key) is not None and not self.video:
                raise ValueError(
                    f"model.{key}: family {self.name!r} generates images, not clips: leave it out"
                )
        if model.native_path is not None and not self.native:
            raise ValueError(
                f"model.native_path: {model.native_path!r}: family {self.name!r} does not support"
                " native files: leave it out"
            )
        if model.path == "shapes":
            self.tiny_decoder = str(SHAPES_DECODER)
        super().__init__(model)

    def check(self, guidance: Guidance | None = None, sharded: bool = False) -> None:
        """Check ``[model]`` and ``[guidance]`` against the model's configuration files.

        ``sharded`` is True if the frozen weights are to be sharded over learner replicas. Raises
        FileNotFoundError or ValueError.
        """
        assert self.latent_shape
        alone = self.boundary is None
        if sharded and not alone:
            # every pass needs all replicas, which would have to use the same transformer
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
                    f"guidance.{stage}: {self.directory!r} is distilled and does not use"
                    " classifier-free guidance: leave out [guidance]"
                )
        if self.model.guidance is not None and not self.embeds_guidance:
            raise ValueError(
                f"model.guidance: {self.directory!r} has no guidance embedding: leave out"
                " model.guidance"
            )
        if self.model.guidance is None and self.embeds_guidance:
            raise ValueError(
                f"model.guidance: {self.directory!r} was distilled with embedded guidance: set"
                " model.guidance, such as 3.5"
            )

    @property
    def distilled(self) -> bool:
        """True if the model was distilled and is used without classifier-free guidance."""
        return self.embeds_guidance

    @property
    def embeds_guidance(self) -> bool:
        """True if the transformer has an input for the guidance strength (not classifier-free)."""
        return bool(self.part_config("transformer").get("guidance_embeds", False))

    @property
    def factor(self) -> int:
        """Downsampling factor f of the autoencoder: image pixels per latent pixel and side."""
        return 2 ** (len(self.part_config("vae")["block_out_channels"]) - 1)

    def sizes(self, unit: int, largest: int | None = None) -> tuple[int, int]:
        """Return (height, width) in pixels.

        Raises ValueError if they are not multiples of ``unit``, or exceed ``largest``.
        """
        for key, pixels in (("height", self.model.height), ("width", self.model.width)):
            if pixels % unit or (largest is not None and pixels > largest):
                limit = f" up to {largest}" if largest is not None else ""
                raise ValueError(
                    f"model.{key}: {pixels} pixels; this model needs multiples of {unit}{limit}"
                )
        return self.model.height, self.model.width

    def load_text(
        self, device: torch.device | str, dtype: torch.dtype, negative: str | None = None
    ) -> PromptEncoder:
        """Load text encoders and tokenizers, and the autoencoder if the family edits images.

        ``negative`` is as in ``PromptEncoder``.
        """
        # diffusers reads no files of parts that are passed as None
        parts: dict[str, Diffusers] = dict.fromkeys((*self.transformers, "vae"))
        for part in self.components:
            if part.startswith("text_encoder") or (self.edits and part == "vae"):
                library, name = self.index[part]
                kind = getattr(importlib.import_module(library), name)
                parts[part] = self._load_complete(part, kind, dtype)
        pipe = self._pretrained(self.stock, "the text encoders", **parts, dtype=dtype)
        encode = self.encode_edit if self.edits else self.encode_prompt
        return PromptEncoder(pipe, encode, device, self.model.text_offload, negative)

    @torch.no_grad()
    def decode(self, vae: Diffusers, latents: Tensor, batch_size: int | None = None) -> Tensor:
        """Decode latents [B, *latent] to uint8 [B, 3, H, W], or clips [B, F, 3, H, W], on the CPU.

        Follows the stock pipelines: unscale, decode, [-1, 1] to [0, 255], round half to even. Clips
        are decoded one at a time, because a batch would need more memory than any denoiser.
        """
        images, size = [], 1 if self.video else batch_size or max(len(latents), 1)
        for rows in latents.split(size):
            image = self.pixels(vae, rows.to(vae.device, vae.dtype)).float()
            images.append((image * 0.5 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8).cpu())
        return torch.cat(images)

    def pixels(self, vae: Diffusers, latents: Tensor) -> Tensor:
        """Decode latents [B, *latent] to [B, 3, H, W] or [B, F, 3, H, W] in [-1, 1]."""
        return vae.decode(self.unscale(vae, latents), return_dict=False)[0]

    def spatial(self, latents: Tensor) -> Tensor:
        """Return latents [B, *latent] in the autoencoder's form, [B, C, H/f, W/f]."""
        return latents

    def packed(self, spatial: Tensor) -> Tensor:
        """Invert ``spatial``."""
        return spatial

    def smaller_noise(self, noise: Tensor, smaller: Family) -> Tensor:
        """Reduce initial noise [B, *latent] to the size of ``smaller``: [B, *smaller latent].

        Each value is the mean of a block times the square root of the block's size, which is again
        standard normal and keeps the coarse structure of the noise.
        """
        rows = self.model.height // smaller.model.height
        columns = self.model.width // smaller.model.width
        # in spatial form, because neighboring pixels are not adjacent in packed latents
        pooled = torch.nn.functional.avg_pool2d(self.spatial(noise), (rows, columns))
        return smaller.packed(pooled * (rows * columns) ** 0.5)

    def guidance_input(self, x: Tensor) -> Tensor | None:
        """Return the embedded guidance, float32 [B], for x [B, *latent]; None without the input."""
        if not self.embeds_guidance:
            return None
        if self.model.guidance is None:
            self.check()
        strength = self.model.guidance or 0.0
        # always FP32, as in the stock pipelines
        return torch.full([1], strength, device=x.device, dtype=torch.float32).expand(len(x))

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """``trained`` for this model; a family may derive more from its configuration files."""
        return self.trained

    @property
    @abstractmethod
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one latent, without the batch dimension.

        Raises ValueError for an image size that the model does not support.
        """

    @property
    @abstractmethod
    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that ``encode_prompt`` returns for a prompt of full length."""

    @property
    def text_tokens(self) -> int:
        """Largest number of tokens that a text encoder reads, including those of a source image."""
        return self.model.max_sequence_length

    @property
    def source_patches(self) -> int:
        """Number of patches of a source image that a text encoder reads."""
        return 0

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Shape of a source image as the autoencoder encodes it, without the batch dimension."""
        return (3, self.model.height, self.model.width)

    @abstractmethod
    def encode_prompt(self, pipe: Diffusers, prompt: str) -> Conditioning:
        """Encode a prompt as one row; ``pipe`` has no transformer and no autoencoder."""

    def encode_edit(self, pipe: Diffusers, prompt: str, image: Pixels) -> Conditioning:
        """Encode a prompt and the image uint8 [3, H, W] that it edits, if the family ``edits``.

        ``pipe`` has the autoencoder, but no transformer.
        """
        raise NotImplementedError(f"family {self.name!r} does not edit images")

    @abstractmethod
    def sigmas(self, steps: int) -> Tensor:
        """Return the schedule: float32 [steps + 1] on the CPU, strictly descending to 0."""

    @abstractmethod
    def velocity(
        self, transformer: Diffusers, x: Tensor, sigma: Tensor, cond: Conditioning
    ) -> Tensor:
        """Return v = eps - x0 [B, *latent] for x [B, *latent], sigma 0-dim or [B], cond of B rows.

        The result is float32, or float64 if the transformer is.
        """

    @classmethod
    def call_arguments(cls, model: Model, guidance: Guidance) -> dict[str, object]:
        """Return the stock pipeline's arguments for images as in an evaluation, but its solver."""
        return {
            **cls.guidance_arguments(model, guidance),
            "height": model.height,
            "width": model.width,
            "max_sequence_length": model.max_sequence_length,
        }

    @classmethod
    def guidance_arguments(cls, model: Model, guidance: Guidance) -> dict[str, object]:
        """Return the stock pipeline's arguments for the guidance of an evaluation."""
        negative = {"negative_prompt": guidance.negative_prompt} if guidance.evaluate != 1 else {}
        return {"guidance_scale": guidance.evaluate, **negative}

    def guidance_scale(self, sigma: Tensor, scale: float, low_noise: float | None) -> Scale:
        """Return the guidance scale at sigma, 0-dim or [B].

        ``low_noise`` is the scale for the second of two transformers. A returned tensor broadcasts
        to [B, *latent].
        """
        return scale

    def guided(self, along: Tensor, against: Tensor, scale: Scale) -> Tensor:
        """Return the guided velocity from those of the prompt and of the negative prompt."""
        return against + scale * (along - against)

    def unscale(self, vae: Diffusers, latents: Tensor) -> Tensor:
        """Return latents [B, *latent] as the decoder expects them, often [B, C, H/f, W/f]."""
        return self.spatial(latents) / vae.config.scaling_factor + vae.config.shift_factor


def to_float32(velocity: Tensor) -> Tensor:
    """Convert a velocity to float32, unless it is float64."""
    return velocity if velocity.dtype == torch.float64 else velocity.float()
