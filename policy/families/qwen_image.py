"""Qwen-Image (arXiv 2508.02324) over diffusers' classes."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from configs.sections import Guidance, Model
from policy.families import joint, padding
from policy.families.base import Diffusers, Scale, to_float32
from policy.families.schedule import unit_timestep
from policy.types import Conditioning


class QwenImage(joint.PackedLatents):
    """``QwenImagePipeline`` as a policy.

    Its autoencoder is a video autoencoder; an image is a clip of one frame.
    """

    name = "qwen_image"
    pipeline_class = "QwenImagePipeline"
    components = {
        "transformer": ("QwenImageTransformer2DModel",),
        "vae": ("AutoencoderKLQwenImage",),
        "scheduler": ("FlowMatchEulerDiscreteScheduler",),
        **joint.text_encoders(1),
    }
    modules_to_not_convert = (
        "time_text_embed.*",
        "img_in",
        "txt_in",
        "*.img_mod.*",
        "*.txt_mod.*",
        "norm_out.*",
        "proj_out",
    )
    fuse = (joint.IMAGE_QKV, joint.TEXT_QKV)
    own_statistics = True
    comfyui = True

    @cached_property
    def lora_targets(self) -> tuple[str, ...]:
        """Attention of both streams, except the last block's text output, which nothing reads."""
        blocks = range(self.part_config("transformer")["num_layers"] - 1)
        return (
            *(target for target in joint.ATTENTION if target != "attn.to_add_out"),
            *(f"transformer_blocks.{block}.attn.to_add_out" for block in blocks),
        )

    @property
    def factor(self) -> int:
        return 2 ** len(self.part_config("vae")["temperal_downsample"])

    @property
    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        width = self.part_config("transformer")["joint_attention_dim"]
        return padding.shapes(self.model.max_sequence_length, width)

    def encode_prompt(self, pipe: Diffusers, prompt: str) -> Conditioning:
        """Encode to prompt_embeds [1, tokens, D] and prompt_embeds_mask [1, tokens] of 0 and 1."""
        tokens = self.model.max_sequence_length
        embeds, _ = pipe.encode_prompt(prompt, max_sequence_length=tokens)
        return padding.padded(embeds[0], tokens)

    def sigmas(self, steps: int) -> Tensor:
        from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

        return joint.sigmas(self, steps, calculate_shift, self.latent_shape[0])

    def velocity(
        self, transformer: Diffusers, x: Tensor, sigma: Tensor, cond: Conditioning
    ) -> Tensor:
        dtype = transformer.img_in.weight.dtype
        embeds, mask = padding.trimmed(cond, x.device, dtype)
        return to_float32(
            transformer(
                hidden_states=self.image_tokens(x.to(dtype), cond),
                timestep=unit_timestep(sigma, x),
                encoder_hidden_states=embeds,
                encoder_hidden_states_mask=mask,
                img_shapes=[self.image_shapes] * len(x),
                return_dict=False,
            )[0][:, : x.shape[1]]  # drop the tokens of a source image, which come last
        )

    @property
    def image_shapes(self) -> list[tuple[int, int, int]]:
        """(frames, rows, columns) in tokens of each input image of the transformer."""
        return [(1, *self.grid)]

    @classmethod
    def guidance_arguments(cls, model: Model, guidance: Guidance) -> dict[str, object]:
        arguments = super().guidance_arguments(model, guidance)
        return {"true_cfg_scale": arguments.pop("guidance_scale"), **arguments}

    def guided(self, along: Tensor, against: Tensor, scale: Scale) -> Tensor:
        """Apply guidance and rescale each token to the norm of the prompt's velocity.

        The stock pipeline does the same.
        """
        combined = super().guided(along, against, scale)
        length = torch.norm(along, dim=-1, keepdim=True)
        return combined * (length / torch.norm(combined, dim=-1, keepdim=True))

    def spatial(self, latents: Tensor) -> Tensor:
        return super().spatial(latents).squeeze(2)

    def unscale(self, vae: Diffusers, latents: Tensor) -> Tensor:
        """Convert latents to [B, C, 1, H/f, W/f], undoing the normalization of each channel."""
        return joint.denormalize_latents(vae, self.spatial(latents).unsqueeze(2))

    def pixels(self, vae: Diffusers, latents: Tensor) -> Tensor:
        return super().pixels(vae, latents)[:, :, 0]
