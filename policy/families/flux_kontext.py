"""FLUX.1 Kontext (arXiv 2506.15742) over diffusers' classes, which edits an image."""

from __future__ import annotations

import torch
from torch import Tensor

from configs.sections import Guidance, Model
from configs.sources import Pixels
from policy.families import editing
from policy.families.base import Diffusers
from policy.families.flux import Flux
from policy.types import Conditioning
from records.images import to_pil


class FluxKontext(Flux):
    """``FluxKontextPipeline`` as a policy.

    The source image's tokens follow those of the generated image, with the same rows and columns
    but another image index. The source image has the size of the generated image. The pipeline
    instead uses the nearest of its own sizes, all of about 1024x1024 pixels; at these sizes both
    are the same.
    """

    name = "flux_kontext"
    pipeline_class = "FluxKontextPipeline"
    edits = True

    @property
    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        return {**super().conditioning_shapes, editing.LATENTS: self.latent_shape}

    def encode_edit(self, pipe: Diffusers, prompt: str, image: Pixels) -> Conditioning:
        """Encode as ``encode_prompt`` does, and the image to image_latents [1, tokens, 4C]."""
        height, width = self.model.height, self.model.width
        shown = pipe.image_processor.preprocess(to_pil(image), height, width)
        shown = shown.to(pipe.vae.device, pipe.vae.dtype)
        latents = self.packed(pipe._encode_vae_image(shown, generator=None))
        return editing.with_source_latents(self.encode_prompt(pipe, prompt), latents)

    def image_tokens(self, x: Tensor, cond: Conditioning) -> Tensor:
        return editing.append_source_tokens(x, cond)

    def image_places(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        generated = super().image_places(device, dtype)
        source = generated.clone()
        source[:, 0] = 1  # the first coordinate is the index of the image
        return torch.cat([generated, source])

    @classmethod
    def call_arguments(cls, model: Model, guidance: Guidance) -> dict[str, object]:
        return {**super().call_arguments(model, guidance), "max_area": model.height * model.width}
