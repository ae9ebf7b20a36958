"""Qwen-Image-Edit from 2509 on (arXiv 2508.02324) over diffusers' classes."""

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
"""Tokens of "Picture 1: " and of the marks around an image, at most."""


class QwenImageEdit(QwenImage):
    """``QwenImageEditPlusPipeline`` with one source image as a policy.

    The language model reads prompt and image, which it gets at about 384x384 pixels. The source's
    tokens follow those that are drawn. It is as large as what is drawn, where the pipeline takes
    about 1024x1024 pixels of the source's shape: the same at those.
    """

    name = "qwen_image_edit"
    pipeline_class = "QwenImageEditPlusPipeline"
    components = {**QwenImage.components, "processor": ()}
    edits = True

    @cached_property
    def text_tokens(self) -> int:
        """Most tokens of a prompt with its image; what is beyond is cut off."""
        merged: int = self.part_config("text_encoder")["vision_config"]["spatial_merge_size"] ** 2
        return self.model.max_sequence_length + self.source_patches // merged + AROUND_IMAGE

    @cached_property
    def source_patches(self) -> int:
        """Patches of the source image at the size that the language model sees."""
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
        """An image is a clip of one frame there."""
        return (3, 1, self.model.height, self.model.width)

    @property
    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        width = self.part_config("transformer")["joint_attention_dim"]
        return {**padding.shapes(self.text_tokens, width), editing.LATENTS: self.latent_shape}

    def encode_edit(self, pipe: Diffusers, prompt: str, image: Pixels) -> Conditioning:
        """As ``encode_prompt``, of prompt and image, and image_latents [1, tokens, 4C]."""
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock

        height, width, whole = self.model.height, self.model.width, to_pil(image)
        columns, rows = stock.calculate_dimensions(stock.CONDITION_IMAGE_SIZE, width / height)
        small = pipe.image_processor.resize(whole, rows, columns)
        embeds, _ = pipe.encode_prompt(prompt, image=[small])
        shown = pipe.image_processor.preprocess(whole, height, width).unsqueeze(2)
        shown = shown.to(pipe.vae.device, pipe.vae.dtype)
        latents = self.packed(pipe._encode_vae_image(shown, generator=None)[:, :, 0])
        row = padding.padded(embeds[0][: self.text_tokens], self.text_tokens)
        return editing.beside(row, latents)

    def image_tokens(self, x: Tensor, cond: Conditioning) -> Tensor:
        return editing.followed(x, cond)

    @property
    def image_shapes(self) -> list[tuple[int, int, int]]:
        return super().image_shapes * 2
