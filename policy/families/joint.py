"""What families share: joint attention over image and text, autoencoders, schedulers."""

from __future__ import annotations

import torch
from torch import Tensor

from policy.families.base import Diffusers

COMPONENTS: dict[str, tuple[str, ...]] = {
    "vae": ("AutoencoderKL",),
    "scheduler": ("FlowMatchEulerDiscreteScheduler",),
}
IMAGE_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
TEXT_QKV = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
ATTENTION = (*IMAGE_QKV, "attn.to_out.0", *TEXT_QKV, "attn.to_add_out")
"""The attention projections of both streams, which LoRA trains."""
UNQUANTIZED = (
    "time_text_embed.*",
    "context_embedder",
    "*.norm1.*",
    "*.norm1_context.*",
    "norm_out.*",
    "proj_out",
)
"""Embedders of time and text, modulation, and the last projection."""


def text_encoders(count: int) -> dict[str, tuple[str, ...]]:
    """The components text_encoder, tokenizer, text_encoder_2, ... of any class."""
    ends = ("", *(f"_{number}" for number in range(2, count + 1)))
    return {f"{part}{end}": () for part in ("text_encoder", "tokenizer") for end in ends}


def by_channel(vae: Diffusers, latents: Tensor) -> Tensor:
    """Latents [B, C, T, H, W] as an autoencoder for video takes them: by the mean and the standard
    deviation of each channel.
    """
    mean, std = (
        torch.tensor(values, dtype=latents.dtype, device=latents.device).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    # the pipelines divide by the reciprocal, which rounds twice
    return latents / (1.0 / std) + mean
