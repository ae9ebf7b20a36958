"""Stable Diffusion 3 and 3.5 (arXiv 2403.03206)."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from policy.families import joint
from policy.families.base import Diffusers, Family, to_float32
from policy.families.schedule import TIMESTEPS
from policy.types import Conditioning


class SD3(Family):
    """``StableDiffusion3Pipeline`` as a policy: latents [C, H/f, W/f]."""

    name = "sd3"
    pipeline_class = "StableDiffusion3Pipeline"
    components = {
        "transformer": ("SD3Transformer2DModel",),
        **joint.COMPONENTS,
        **joint.text_encoders(3),
    }
    trained = joint.ATTENTION
    modules_to_not_convert = (*joint.UNQUANTIZED, "pos_embed.*")
    tiny_decoder = "madebyollin/taesd3"
    comfyui = True
    fuse = (joint.IMAGE_QKV, joint.TEXT_QKV, ("attn2.to_q", "attn2.to_k", "attn2.to_v"))

    @cached_property
    def latent_shape(self) -> tuple[int, ...]:
        transformer = self.part_config("transformer")
        unit = self.factor * transformer["patch_size"]
        height, width = self.sizes(unit, transformer["pos_embed_max_size"] * unit)
        return (transformer["in_channels"], height // self.factor, width // self.factor)

    @property
    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        config = self.part_config("transformer")
        tokens = (
            self.part_config("text_encoder")["max_position_embeddings"]
            + self.model.max_sequence_length
        )
        return {
            "prompt_embeds": (tokens, config["joint_attention_dim"]),
            "pooled_prompt_embeds": (config["pooled_projection_dim"],),
        }

    def encode_prompt(self, pipe: Diffusers, prompt: str) -> Conditioning:
        """Return prompt_embeds [1, 77 + max_sequence_length, D], pooled_prompt_embeds [1, D']."""
        embeds, _, pooled, _ = pipe.encode_prompt(
            prompt,
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=self.model.max_sequence_length,
        )
        return Conditioning({"prompt_embeds": embeds, "pooled_prompt_embeds": pooled})

    def sigmas(self, steps: int) -> Tensor:
        from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import (
            calculate_shift,
        )

        _, height, width = self.latent_shape
        patch = self.part_config("transformer")["patch_size"]
        tokens = (height // patch) * (width // patch)
        return joint.sigmas(self, steps, calculate_shift, tokens)

    def velocity(
        self, transformer: Diffusers, x: Tensor, sigma: Tensor, cond: Conditioning
    ) -> Tensor:
        # of a layer that is never packed or adapted; other parameters may have other dtypes
        dtype = transformer.pos_embed.proj.weight.dtype
        return to_float32(
            transformer(
                hidden_states=x.to(dtype),
                timestep=(sigma.to(x.device, torch.float32) * TIMESTEPS).expand(len(x)),
                encoder_hidden_states=cond.tensors["prompt_embeds"].to(x.device, dtype),
                pooled_projections=cond.tensors["pooled_prompt_embeds"].to(x.device, dtype),
                return_dict=False,
            )[0]
        )
