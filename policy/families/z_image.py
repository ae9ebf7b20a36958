"""Z-Image (arXiv 2511.22699) over diffusers' classes.

It is a single-stream transformer: the tokens of prompt and image are one sequence.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from configs.sections import Guidance, Model
from policy.families import joint, padding
from policy.families.base import Diffusers, Family, to_float32
from policy.families.schedule import TIMESTEPS
from policy.types import Conditioning

PATCH = 2
"""Latent pixels per side of an image token, the only size that the pipeline uses."""


class ZImage(Family):
    """``ZImagePipeline`` as a policy: latents [C, H/f, W/f].

    The transformer's timestep is 1 - sigma, and its output is x0 - eps.
    """

    name = "z_image"
    pipeline_class = "ZImagePipeline"
    components = {
        "transformer": ("ZImageTransformer2DModel",),
        **joint.COMPONENTS,
        **joint.text_encoders(1),
    }
    trained = tuple(f"attention.{part}" for part in ("to_q", "to_k", "to_v", "to_out.0"))
    modules_to_not_convert = (
        "t_embedder.*",
        "cap_embedder.*",
        "all_x_embedder.*",
        "all_final_layer.*",
        "*.adaLN_modulation.*",
    )
    fuse = (
        ("attention.to_q", "attention.to_k", "attention.to_v"),
        ("feed_forward.w1", "feed_forward.w3"),
    )
    tiny_decoder = "madebyollin/taef1"  # its autoencoder is that of FLUX.1
    comfyui = True

    @cached_property
    def latent_shape(self) -> tuple[int, ...]:
        transformer = self.part_config("transformer")
        unit = self.factor * PATCH
        # the limit is the size of the position table; its first axis is for the prompt's tokens
        height, width = self.sizes(unit, unit * min(transformer["axes_lens"][1:]))
        return (transformer["in_channels"], height // self.factor, width // self.factor)

    @property
    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        width = self.part_config("transformer")["cap_feat_dim"]
        return padding.shapes(self.model.max_sequence_length, width)

    def encode_prompt(self, pipe: Diffusers, prompt: str) -> Conditioning:
        """Encode to prompt_embeds [1, tokens, D] and prompt_embeds_mask [1, tokens] of 0 and 1."""
        tokens = self.model.max_sequence_length
        (embeds,), _ = pipe.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=tokens
        )
        return padding.padded(embeds, tokens)

    def sigmas(self, steps: int) -> Tensor:
        from diffusers.pipelines.z_image.pipeline_z_image import (
            calculate_shift,
            get_default_z_image_sigmas,
        )

        _, height, width = self.latent_shape
        tokens = (height // PATCH) * (width // PATCH)
        return joint.sigmas(self, steps, calculate_shift, tokens, get_default_z_image_sigmas)

    def velocity(
        self, transformer: Diffusers, x: Tensor, sigma: Tensor, cond: Conditioning
    ) -> Tensor:
        dtype = next(iter(transformer.all_x_embedder.values())).weight.dtype
        timestep = sigma.to(x.device, torch.float32) * TIMESTEPS
        embeds = cond.tensors[padding.EMBEDS].to(x.device, dtype)
        prompts = [row[:used] for row, used in zip(embeds, padding.lengths(cond), strict=True)]
        # the transformer takes lists of clips [C, 1, H/f, W/f] and of prompts of any length
        outputs = transformer(
            list(x.to(dtype).unsqueeze(2).unbind(0)),
            ((TIMESTEPS - timestep) / TIMESTEPS).expand(len(x)),
            prompts,
            return_dict=False,
        )[0]
        return -torch.stack([to_float32(row) for row in outputs]).squeeze(2)

    @classmethod
    def guidance_arguments(cls, model: Model, guidance: Guidance) -> dict[str, object]:
        arguments = super().guidance_arguments(model, guidance)
        return {**arguments, "guidance_scale": guidance.evaluate - 1}

    def guided(self, along: Tensor, against: Tensor, scale: float) -> Tensor:
        """Combine as the stock pipeline does; its own scale is this one minus 1."""
        return along + (scale - 1) * (along - against)
