"""Qwen-Image-Edit, release 2509 and later (arXiv 2508.02324), over diffusers' classes."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from configs.sources import Pixels
from policy.families import editing, padding
from policy.families.base import Diffusers
from policy.families.qwen_image import QwenImage
from policy.types import Conditioning
from records.images import to_pil

AROUND_IMAGE = 8
"""Maximum number of tokens of "Picture 1: " and of the markers around an image."""


class QwenImageEdit(QwenImage):
    """``QwenImageEditPlusPipeline`` with one source image as a policy.

    The language model reads the prompt and the image, resized to about 384x384 pixels. In the
    transformer, the source image's tokens follow those of the generated image. The source image has
    the size of the generated image. The pipeline instead uses about 1024x1024 pixels in the
    source's aspect ratio; at that size both are the same.
    """

    name = "qwen_image_edit"
    pipeline_class = "QwenImageEditPlusPipeline"
    components = {**QwenImage.components, "processor": ()}
    edits = True

    @cached_property
    def text_tokens(self) -> int:
        """Maximum number of tokens of a prompt with its image; further tokens are cut off."""
        merged: int = self.part_config("text_encoder")["vision_config"]["spatial_merge_size"] ** 2
        return self.model.max_sequence_length + self.source_patches // merged + AROUND_IMAGE

    @cached_property
    def source_patches(self) -> int:
        """Number of patches of the source image at the language model's input size."""
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock

        vision = self.part_config("text_encoder")["vision_config"]
        merged = vision["spatial_merge_size"]
        unit = vision["patch_size"] * merged
        width, height = stock.calculate_dimensions(
            stock.CONDITION_IMAGE_SIZE, self.model.width / self.model.height
        )
        return round(height / unit) * round(width / unit) * merged**2

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Shape of a source image for the video autoencoder: a clip of one frame."""
        return (3, 1, self.model.height, self.model.width)

    @property
    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        width = self.part_config("transformer")["joint_attention_dim"]
        return {**padding.shapes(self.text_tokens, width), editing.LATENTS: self.latent_shape}

    def encode_edit(self, pipe: Diffusers, prompt: str, image: Pixels) -> Conditioning:
        """Encode prompt and image as ``encode_prompt`` does, and image_latents [1, tokens, 4C]."""
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock

        height, width, whole = self.model.height, self.model.width, to_pil(image)
        columns, rows = stock.calculate_dimensions(stock.CONDITION_IMAGE_SIZE, width / height)
        small = pipe.image_processor.resize(whole, rows, columns)
        embeds, _ = pipe.encode_prompt(prompt, image=[small])
        shown = pipe.image_processor.preprocess(whole, height, width).unsqueeze(2)
        shown = shown.to(pipe.vae.device, pipe.vae.dtype)
        latents = self.packed(pipe._encode_vae_image(shown, generator=None)[:, :, 0])
        row = padding.padded(embeds[0][: self.text_tokens], self.text_tokens)
        return editing.with_source_latents(row, latents)

    def image_tokens(self, x: Tensor, cond: Conditioning) -> Tensor:
        return editing.append_source_tokens(x, cond)

    @property
    def image_shapes(self) -> list[tuple[int, int, int]]:
        return super().image_shapes * 2
