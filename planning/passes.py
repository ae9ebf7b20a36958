"""What training, decoding and reading a source image take: run on the meta device, and counted.

Modules are built without memory (``policy.meta``). What sampling takes is in ``policy.pass_cost``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from policy.checkpointing import checkpoint_blocks
from policy.families.base import Diffusers, Family
from policy.lora import use_adapter
from policy.meta import META, meta_component
from policy.pass_cost import PassCost, conditioning_like, held_bytes
from policy.tally import Tally, fused_attention


def training_work(
    family: Family, transformer: nn.Module, batch: int, dtype: torch.dtype, recomputed: float
) -> PassCost:
    """Forward and backward pass of ``batch`` points, a share of the blocks ``recomputed``; the peak
    has the adapter's gradients in it.
    """
    model: Diffusers = transformer
    checkpoint_blocks(model, recomputed)
    x = torch.empty(batch, *family.latent_shape, device=META)
    cond = conditioning_like(family, batch, dtype)
    try:
        with fused_attention(), Tally() as tally, use_adapter(transformer, "current"):
            velocity = family.velocity(transformer, x, torch.full((batch,), 0.5, device=META), cond)
            loss = (velocity - x).square().mean()
            del velocity
            loss.backward()
    finally:
        transformer.zero_grad(set_to_none=True)
        if recomputed:
            model.disable_gradient_checkpointing()
    return PassCost.of(tally)


def decoding_work(
    family: Family, batch: int, decoder: nn.Module | None = None, gpu: bool = False
) -> tuple[int, PassCost]:
    """(bytes of the decoder, work of decoding ``batch`` latents as configured). ``decoder`` is one
    on the meta device; None: the model's own autoencoder in FP32. ``gpu``: it runs on one.

    Clips are decoded one at a time, as ``Family.decode`` does it.
    """
    vae: Diffusers = meta_component(family, "vae", torch.float32) if decoder is None else decoder
    if family.model.vae_slicing:
        vae.enable_slicing()
    if family.model.vae_tiling:
        vae.enable_tiling()
    together = 1 if family.video else batch
    latents = torch.empty(together, *family.latent_shape, device=META, dtype=vae.dtype)
    with torch.no_grad(), fused_attention(), Tally(converts=gpu) as tally:
        family.pixels(vae, latents).float().clamp(0, 1)
    return held_bytes(vae), replace(PassCost.of(tally), flops=tally.flops * (batch // together))


def source_work(family: Family, dtype: torch.dtype, gpu: bool = False) -> PassCost:
    """The encoder's autoencoder on the image that a prompt edits, in ``dtype``."""
    vae: Diffusers = meta_component(family, "vae", dtype)
    image = torch.empty(1, *family.source_shape, device=META, dtype=dtype)
    with torch.no_grad(), fused_attention(), Tally(converts=gpu) as tally:
        vae.encode(image, return_dict=False)
    return PassCost.of(tally)
