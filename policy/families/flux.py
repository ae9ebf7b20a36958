"""FLUX.1 (black-forest-labs) over diffusers' classes.

The transformer is distilled: guidance is one of its inputs and needs no second pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from configs.sections import Guidance, Model
from policy.families import joint
from policy.families.base import Diffusers, to_float32
from policy.families.schedule import unit_timestep
from policy.types import Conditioning


class Flux(joint.PackedLatents):
    """``FluxPipeline`` as a policy."""

    name = "flux"
    pipeline_class = "FluxPipeline"
    components = {
        "transformer": ("FluxTransformer2DModel",),
        **joint.COMPONENTS,
        **joint.text_encoders(2),
    }
    trained = (
        *joint.ATTENTION,
        "single_transformer_blocks.*.proj_mlp",
        "single_transformer_blocks.*.proj_out",
    )
    modules_to_not_convert = (*joint.UNQUANTIZED, "x_embedder", "*.norm.linear")
    tiny_decoder = "madebyollin/taef1"
    comfyui = True
    fuse = (joint.IMAGE_QKV, joint.TEXT_QKV)

    @property
    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        config, tokens = self.part_config("transformer"), self.model.max_sequence_length
        return {
            "prompt_embeds": (tokens, config["joint_attention_dim"]),
            "pooled_prompt_embeds": (config["pooled_projection_dim"],),
        }

    def encode_prompt(self, pipe: Diffusers, prompt: str) -> Conditioning:
        """Encode to prompt_embeds [1, tokens, D] (T5) and pooled_prompt_embeds [1, D'] (CLIP)."""
        embeds, pooled, _ = pipe.encode_prompt(
            prompt, prompt_2=None, max_sequence_length=self.model.max_sequence_length
        )
        return Conditioning({"prompt_embeds": embeds, "pooled_prompt_embeds": pooled})

    def sigmas(self, steps: int) -> Tensor:
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        return joint.sigmas(self, steps, calculate_shift, self.latent_shape[0])

    def velocity(
        self, transformer: Diffusers, x: Tensor, sigma: Tensor, cond: Conditioning
    ) -> Tensor:
        dtype = transformer.x_embedder.weight.dtype
        prompt = cond.tensors["prompt_embeds"].to(x.device, dtype)
        return to_float32(
            transformer(
                hidden_states=self.image_tokens(x.to(dtype), cond),
                timestep=unit_timestep(sigma, x),
                guidance=self.guidance_input(x),
                pooled_projections=cond.tensors["pooled_prompt_embeds"].to(x.device, dtype),
                encoder_hidden_states=prompt,
                txt_ids=torch.zeros(prompt.shape[1], 3, device=x.device, dtype=dtype),
                img_ids=self.image_places(x.device, dtype),
                return_dict=False,
            )[0][:, : x.shape[1]]  # drop the tokens of a source image, which come last
        )

    def image_places(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the positions of the image tokens, [tokens, 3]: image, row, column."""
        return self.stock._prepare_latent_image_ids(1, *self.grid, device, dtype)

    @classmethod
    def guidance_arguments(cls, model: Model, guidance: Guidance) -> dict[str, object]:
        return {"guidance_scale": model.guidance}
