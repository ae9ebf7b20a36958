"""Stable Diffusion 3 and 3.5 (arXiv 2403.03206) over diffusers' classes. No classifier-free guidance."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from policy.families.base import Family, TextEncoder
from policy.types import Conditioning

TIMESTEPS = 1000.0
"""The transformer's `timestep` is 1000 sigma."""


class SD3(Family):
    """``StableDiffusion3Pipeline`` as a policy: latents [C, H/f, W/f]."""

    name = "sd3"
    pipeline_class = "StableDiffusion3Pipeline"
    lora_targets = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )
    keep_wide = ("time_text_embed.*", "context_embedder", "pos_embed.*", "*.norm1.*", "*.norm1_context.*", "norm_out.*", "proj_out")

    @cached_property
    def latent_shape(self) -> tuple[int, ...]:
        from diffusers import AutoencoderKL, SD3Transformer2DModel

        transformer = self.part_config(SD3Transformer2DModel, "transformer")
        factor = 2 ** (len(self.part_config(AutoencoderKL, "vae")["block_out_channels"]) - 1)
        unit = factor * transformer["patch_size"]
        for key, pixels in (("height", self.model.height), ("width", self.model.width)):
            largest = transformer["pos_embed_max_size"] * unit
            if pixels % unit or pixels > largest:
                raise ValueError(f"model.{key}: {pixels} pixels; this model makes multiples of {unit} up to {largest}")
        return (transformer["in_channels"], self.model.height // factor, self.model.width // factor)

    def load_text(self, device: torch.device | str, dtype: torch.dtype) -> TextEncoder:
        from diffusers import StableDiffusion3Pipeline

        try:
            pipe = StableDiffusion3Pipeline.from_pretrained(self.directory, transformer=None, vae=None, dtype=dtype)
        except OSError as error:
            reason = str(error).strip().splitlines()[0]
            raise FileNotFoundError(f"model.path: cannot load the text encoders of {self.directory!r}: {reason}") from error
        if pipe.text_encoder_3 is None:
            raise ValueError(f"model.path: {self.directory!r} has no text_encoder_3 (T5), which the sd3 family needs")
        return SD3TextEncoder(pipe.to(device), self.model.max_sequence_length)

    def load_transformer(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        from diffusers import SD3Transformer2DModel

        return self.load(SD3Transformer2DModel, "transformer", device, dtype)

    def load_vae(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        from diffusers import AutoencoderKL

        return self.load(AutoencoderKL, "vae", device, dtype)

    def sigmas(self, steps: int) -> Tensor:
        """The stock scheduler's sigmas for linspace(1, 1/steps, steps), which it shifts.

        The scheduler's own default spacing ends at sigma = shift / (999 + shift), which wastes the last step.
        """
        if steps < 1:
            raise ValueError(f"{steps} sampling steps: at least 1 is needed")
        scheduler, mu = self._scheduler
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / steps, steps).tolist(), mu=mu)
        return scheduler.sigmas.to("cpu", torch.float32).clone()

    @cached_property
    def _scheduler(self) -> tuple[Any, float | None]:
        """The pipeline's scheduler with ``model.shift`` in place of its own, and the mu of its dynamic shifting."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        config = self.part_config(FlowMatchEulerDiscreteScheduler, "scheduler")
        if self.model.shift is not None:
            config = {**config, "shift": self.model.shift, "use_dynamic_shifting": False}
        scheduler: Any = FlowMatchEulerDiscreteScheduler.from_config(config)
        if not scheduler.config.use_dynamic_shifting:
            return scheduler, None
        from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

        from_pipeline = scheduler.config
        _, height, width = self.latent_shape
        return scheduler, calculate_shift(
            (height // 2) * (width // 2),
            from_pipeline.base_image_seq_len,
            from_pipeline.max_image_seq_len,
            from_pipeline.base_shift,
            from_pipeline.max_shift,
        )

    def velocity(self, transformer: Any, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        dtype = transformer.pos_embed.proj.weight.dtype
        return transformer(
            hidden_states=x.to(dtype),
            timestep=(sigma.to(x.device, torch.float32) * TIMESTEPS).expand(len(x)),
            encoder_hidden_states=cond.tensors["prompt_embeds"].to(x.device, dtype),
            pooled_projections=cond.tensors["pooled_prompt_embeds"].to(x.device, dtype),
            return_dict=False,
        )[0].float()

    @torch.no_grad()
    def decode(self, vae: Any, latents: Tensor, batch_size: int | None = None) -> Tensor:
        """As the stock pipeline decodes: unscale, decode, [-1, 1] to [0, 255], round half to even."""
        pictures = []
        for rows in latents.split(batch_size or max(len(latents), 1)):
            unscaled = rows.to(vae.device, vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
            picture = vae.decode(unscaled, return_dict=False)[0].float()
            pictures.append((picture * 0.5 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8).cpu())
        return torch.cat(pictures)


class SD3TextEncoder:
    """CLIP, CLIP and T5 of one pipeline, without transformer and autoencoder."""

    def __init__(self, pipe: Any, max_sequence_length: int) -> None:
        self.pipe = pipe
        self.max_sequence_length = max_sequence_length
        for encoder in (pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3):
            encoder.eval().requires_grad_(False)

    @torch.no_grad()
    def encode(self, prompts: list[str]) -> Conditioning:
        """prompt_embeds [B, 77 + max_sequence_length, D] and pooled_prompt_embeds [B, D'] on the CPU.

        Prompts are encoded one by one: floating-point sums depend on the shape of a batch, and a row should be a function
        of its own prompt, whichever prompts it travels with.
        """
        if not prompts:
            raise ValueError("no prompts to encode")
        unique = {prompt: self._encode_one(prompt) for prompt in dict.fromkeys(prompts)}
        return Conditioning.cat([unique[prompt] for prompt in prompts])

    def _encode_one(self, prompt: str) -> Conditioning:
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            prompt,
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return Conditioning({"prompt_embeds": embeds.cpu(), "pooled_prompt_embeds": pooled.cpu()})
