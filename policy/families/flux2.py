"""FLUX.2 (black-forest-labs) over diffusers' classes: dev, with an embedded guidance, and klein."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from configs.sections import Guidance, Model
from policy.families import joint
from policy.families.base import Diffusers, Family, to_float32
from policy.families.schedule import unit_timestep
from policy.types import Conditioning

PACK = 2
"""Latent pixels per side of an image token."""


class Flux2(Family):
    """``Flux2Pipeline`` as a policy: latents [4C, H/2f, W/2f], one image token per position.

    As in the pipeline, padding of a prompt is not masked. The schedule's shift also depends on the
    number of steps.
    """

    name = "flux2"
    pipeline_class = "Flux2Pipeline"
    components = {
        "transformer": ("Flux2Transformer2DModel",),
        "vae": ("AutoencoderKLFlux2",),
        "scheduler": ("FlowMatchEulerDiscreteScheduler",),
        **joint.text_encoders(1),
    }
    trained = (
        *joint.ATTENTION,
        "single_transformer_blocks.*.attn.to_qkv_mlp_proj",
        "single_transformer_blocks.*.attn.to_out",
    )
    modules_to_not_convert = (
        "time_guidance_embed.*",
        "double_stream_modulation_img.*",
        "double_stream_modulation_txt.*",
        "single_stream_modulation.*",
        "x_embedder",
        "context_embedder",
        "norm_out.*",
        "proj_out",
    )
    fuse = (joint.IMAGE_QKV, joint.TEXT_QKV)
    own_statistics = True
    comfyui = True

    @property
    def embeds_guidance(self) -> bool:
        """True unless the configuration says False: dev's first files did not have the key."""
        return bool(self.part_config("transformer").get("guidance_embeds", True))

    @cached_property
    def latent_shape(self) -> tuple[int, ...]:
        unit = PACK * self.factor
        height, width = self.sizes(unit)
        return (self.part_config("transformer")["in_channels"], height // unit, width // unit)

    @property
    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        width = self.part_config("transformer")["joint_attention_dim"]
        return {"prompt_embeds": (self.model.max_sequence_length, width)}

    def encode_prompt(self, pipe: Diffusers, prompt: str) -> Conditioning:
        """Encode to prompt_embeds [1, tokens, D], three concatenated layers of the text encoder."""
        embeds, _ = pipe.encode_prompt(prompt, max_sequence_length=self.model.max_sequence_length)
        return Conditioning({"prompt_embeds": embeds})

    def sigmas(self, steps: int) -> Tensor:
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        _, rows, columns = self.latent_shape
        return joint.sigmas(
            self, steps, lambda tokens, *_: compute_empirical_mu(tokens, steps), rows * columns
        )

    def velocity(
        self, transformer: Diffusers, x: Tensor, sigma: Tensor, cond: Conditioning
    ) -> Tensor:
        dtype = transformer.x_embedder.weight.dtype
        prompt = cond.tensors["prompt_embeds"].to(x.device, dtype)
        tokens = transformer(
            hidden_states=self.stock._pack_latents(x.to(dtype)),
            timestep=unit_timestep(sigma, x),
            guidance=self.guidance_input(x),
            encoder_hidden_states=prompt,
            txt_ids=self.stock._prepare_text_ids(prompt[:1]).to(x.device),
            img_ids=self.stock._prepare_latent_ids(x[:1]).to(x.device),
            return_dict=False,
        )[0]
        return to_float32(tokens.permute(0, 2, 1).reshape(x.shape))

    @classmethod
    def guidance_arguments(cls, model: Model, guidance: Guidance) -> dict[str, object]:
        return {"guidance_scale": model.guidance}

    def spatial(self, latents: Tensor) -> Tensor:
        return self.stock._unpatchify_latents(latents)

    def packed(self, spatial: Tensor) -> Tensor:
        return self.stock._patchify_latents(spatial)

    def unscale(self, vae: Diffusers, latents: Tensor) -> Tensor:
        """Convert latents to [B, C, H/f, W/f] by the running statistics of the vae's batch norm."""
        mean = vae.bn.running_mean.view(1, -1, 1, 1).to(latents)
        variance = vae.bn.running_var.view(1, -1, 1, 1)
        std = torch.sqrt(variance + vae.config.batch_norm_eps).to(latents)
        return self.spatial(latents * std + mean)


class Flux2Klein(Flux2):
    """``Flux2KleinPipeline``: smaller, with another text encoder and no embedded guidance."""

    name = "flux2_klein"
    pipeline_class = "Flux2KleinPipeline"

    @property
    def embeds_guidance(self) -> bool:
        """False: the pipeline passes no guidance."""
        return False

    @classmethod
    def guidance_arguments(cls, model: Model, guidance: Guidance) -> dict[str, object]:
        """Return the scale only: the pipeline always uses an empty negative prompt."""
        return {"guidance_scale": guidance.evaluate}

    @property
    def distilled(self) -> bool:
        return bool(self.index.get("is_distilled", False))
