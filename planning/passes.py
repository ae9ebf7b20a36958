"""Count the work of training, decoding and encoding a source image by running it on meta tensors.

Modules are built without memory (``policy.meta``). The work of sampling is counted in
``policy.pass_cost``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from policy.checkpointing import checkpoint_blocks
from policy.counted_once import CountedOnce
from policy.families.base import Diffusers, Family
from policy.lora import use_adapter
from policy.meta import META, meta_component
from policy.pass_cost import PassCost, conditioning_like, held_bytes
from policy.tally import Tally, fused_attention


def training_work(
    family: Family, transformer: nn.Module, batch: int, dtype: torch.dtype, recomputed: float
) -> PassCost:
    """Return the work of a forward and backward pass of ``batch`` training points.

    ``recomputed`` is the share of blocks whose activations are recomputed in the backward pass. The
    peak includes the gradients of the adapter.
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
    """Return (bytes of the decoder, work of decoding ``batch`` latents as configured).

    ``decoder`` is a module on the meta device; None: the model's own autoencoder in FP32. ``gpu``
    says that it will run on a GPU, where convolutions need more memory (``policy.tally``). Clips
    are decoded one at a time, as in ``Family.decode``.
    """
    vae: Diffusers = meta_component(family, "vae", torch.float32) if decoder is None else decoder
    if family.model.vae_slicing:
        vae.enable_slicing()
    if family.model.vae_tiling:
        vae.enable_tiling()
    decoded_at_once = 1 if family.video else batch
    latents = torch.empty(decoded_at_once, *family.latent_shape, device=META, dtype=vae.dtype)
    tally = Tally(converts=gpu)
    with torch.no_grad(), fused_attention(), tally, _slices_counted_once(vae, tally):
        family.pixels(vae, latents).float().clamp(0, 1)
    return held_bytes(vae), replace(
        PassCost.of(tally), flops=tally.flops * (batch // decoded_at_once)
    )


@contextmanager
def _slices_counted_once(vae: Diffusers, tally: Tally) -> Iterator[None]:
    """Within the context, run the decoding of one of equal slices of a batch only."""
    if not hasattr(vae, "_decode"):  # a tiny autoencoder
        yield
        return
    vae._decode = CountedOnce(vae._decode, tally)
    try:
        yield
    finally:
        del vae._decode  # the class has it


def source_work(family: Family, dtype: torch.dtype, gpu: bool = False) -> PassCost:
    """Return the work of encoding one source image with the autoencoder in ``dtype``."""
    vae: Diffusers = meta_component(family, "vae", dtype)
    image = torch.empty(1, *family.source_shape, device=META, dtype=dtype)
    with torch.no_grad(), fused_attention(), Tally(converts=gpu) as tally:
        vae.encode(image, return_dict=False)
    return PassCost.of(tally)
