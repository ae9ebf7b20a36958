"""Shared parts of families: joint attention of image and text, autoencoders, schedulers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from policy.families.base import Diffusers, Family
from policy.families.schedule import (
    TIMESTEPS,
    even_spacing,
    flow_match_sigmas,
    multistep_sigmas,
    whole_timestep,
)
from policy.types import Conditioning

COMPONENTS: dict[str, tuple[str, ...]] = {
    "vae": ("AutoencoderKL",),
    "scheduler": ("FlowMatchEulerDiscreteScheduler",),
}
IMAGE_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
TEXT_QKV = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
ATTENTION = (*IMAGE_QKV, "attn.to_out.0", *TEXT_QKV, "attn.to_add_out")
"""Attention projections of the image and the text stream, which LoRA trains."""
SELF_AND_CROSS = tuple(
    f"{attention}.{part}"
    for attention in ("attn1", "attn2")
    for part in ("to_q", "to_k", "to_v", "to_out.0")
)
"""Attention projections of blocks with self-attention and cross-attention, which LoRA trains."""
SELF_AND_CROSS_FUSE = (("attn1.to_q", "attn1.to_k", "attn1.to_v"), ("attn2.to_k", "attn2.to_v"))
UNQUANTIZED = (
    "time_text_embed.*",
    "context_embedder",
    "*.norm1.*",
    "*.norm1_context.*",
    "norm_out.*",
    "proj_out",
)
"""Modules that stay unquantized: time and text embedders, modulation, the last projection."""


def text_encoders(count: int) -> dict[str, tuple[str, ...]]:
    """Return the components text_encoder, text_encoder_2, ..., tokenizer, ... of any class."""
    suffixes = ("", *(f"_{number}" for number in range(2, count + 1)))
    return {f"{part}{suffix}": () for part in ("text_encoder", "tokenizer") for suffix in suffixes}


def sigmas(
    family: Family,
    steps: int,
    calculate_shift: Callable[..., float],
    tokens: int,
    spacing: Callable[[int], list[float]] = even_spacing,
) -> Tensor:
    """Return ``flow_match_sigmas`` for the family's scheduler and ``[model]``."""
    model, config = family.model, family.part_config("scheduler")
    return flow_match_sigmas(
        config, steps, model.shift, calculate_shift, tokens, model.schedule, spacing
    )


class Multistep(Family):
    """Family whose stock pipeline may have one of diffusers' multistep schedulers.

    Their timesteps are whole numbers. With ``FlowMatchEulerDiscreteScheduler``, or the schedule
    "uniform", timesteps are not rounded.
    """

    euler_schedule = "own"
    """The ``model.schedule`` that corresponds to the stock pipeline's use of an Euler scheduler."""

    @cached_property
    def multistep(self) -> str | None:
        """Class name of the multistep scheduler if its schedule is used, else None."""
        name = self.index["scheduler"][-1]
        euler = name == "FlowMatchEulerDiscreteScheduler" or self.model.schedule == "uniform"
        return None if euler else name

    def sigmas(self, steps: int) -> Tensor:
        """Return the pipeline's own schedule, unless ``model.schedule`` is another."""
        config, model = self.part_config("scheduler"), self.model
        if self.multistep is not None:
            return multistep_sigmas(config, steps, model.shift, self.multistep)
        schedule = self.euler_schedule if model.schedule == "own" else model.schedule
        return flow_match_sigmas(config, steps, model.shift, schedule=schedule)

    def timestep(self, sigma: Tensor) -> Tensor:
        """Return the timestep, float32 in [0, 1000]; a whole number if the scheduler's are."""
        return sigma.float() * TIMESTEPS if self.multistep is None else whole_timestep(sigma)


class PackedLatents(Family):
    """Family with latents [H/2f * W/2f, 4C]: row-major image tokens of 2 x 2 latent pixels."""

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Numbers of (rows, columns) of image tokens."""
        unit = self.factor * 2
        height, width = self.sizes(unit)
        return height // unit, width // unit

    @cached_property
    def latent_shape(self) -> tuple[int, ...]:
        rows, columns = self.grid
        return (rows * columns, self.part_config("transformer")["in_channels"])

    def spatial(self, latents: Tensor) -> Tensor:
        size = self.model.height, self.model.width
        return self.stock._unpack_latents(latents, *size, self.factor)

    def packed(self, spatial: Tensor) -> Tensor:
        return self.stock._pack_latents(spatial, *spatial.shape)

    def image_tokens(self, x: Tensor, cond: Conditioning) -> Tensor:
        """Return the transformer's image tokens [B, tokens, 4C], the generated image's first."""
        return x


def denormalize_latents(vae: Diffusers, latents: Tensor) -> Tensor:
    """Convert latents [B, C, T, H, W] to a video autoencoder's input.

    This undoes the normalization by the mean and the standard deviation of each channel.
    """
    mean, std = (
        torch.tensor(values, dtype=latents.dtype, device=latents.device).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    # divide by the reciprocal as the pipelines do: multiplying by std would round differently
    return latents / (1.0 / std) + mean
