"""Autoencoder of clips: diffusers' AutoencoderKLWan with 48 channels at an eighth of each side.

There is one latent frame for the first frame and one for every four frames after it: [3, 9, 32, 32]
maps to [48, 3, 4, 4].
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan

from shapes.budget import Budget
from shapes.moving import FRAMES, ClipPool
from shapes.vae import KL_WEIGHT, calibrate, convolutions_apart, learn_vae, to_float

CHANNELS, FACTOR, EVERY = 48, 8, 4
IMAGES, CLIPS = 48, 12  # per batch
IMAGES_UNTIL = 0.4  # share of the time with batches of images only, which cost a quarter
REFINED = 0.5  # factor on the learning rates when the decoder is trained alone
NOISE = 0.1  # deviation of noise on decoded latents, because a denoiser's are not exact
WHITENING = 0.3  # 0.4 for images; with four times as many channels, more are faint


def build_vae() -> AutoencoderKLWan:
    """Return an untrained autoencoder of 0.76 M parameters.

    It works on patches of 2x2 pixels, like Wan 2.2's; at full size its convolutions would take four
    times as long.
    """
    return AutoencoderKLWan(
        base_dim=16,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_temporal=EVERY,
        scale_factor_spatial=FACTOR,
    )


def to_video(clips: np.ndarray) -> torch.Tensor:
    """Convert uint8 [B, F, 3, H, W] to float32 [B, 3, F, H, W] in [-1, 1]."""
    return to_float(clips).transpose(1, 2).contiguous()


def unclamped(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Decode latents like ``vae.decode``, but without clamping to [-1, 1].

    Clamping would stop the gradients.
    """
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

    vae.clear_cache()
    x, frames = vae.post_quant_conv(latents), []
    for index in range(latents.shape[2]):
        vae._conv_idx = [0]
        frames.append(
            vae.decoder(
                x[:, :, index : index + 1],
                feat_cache=vae._feat_map,
                feat_idx=vae._conv_idx,
                first_chunk=index == 0,
            )
        )
    vae.clear_cache()
    return unpatchify(torch.cat(frames, 2), patch_size=2)


def train_vae(minutes: float, work: Path, log: Callable[[str], None]) -> AutoencoderKLWan:
    """Train for ``minutes`` (counted over resumed runs): first on images, then also on clips."""
    torch.manual_seed(1)
    vae, pool, turn = build_vae(), ClipPool(1), 0

    def loss(done: float) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal turn
        turn += 1
        if done < IMAGES_UNTIL or turn % 4 == 0:
            clips = pool.images(IMAGES)[0][:, None]
        else:
            clips = pool.clips(CLIPS)[0]
        x = to_video(clips)
        latent = vae.encode(x).latent_dist
        out = unclamped(vae, latent.sample())
        error = F.mse_loss(out, x)
        return F.l1_loss(out, x) + 4 * error + KL_WEIGHT * latent.kl().mean(), error

    learn_vae(Budget(work / "vae", vae, convolutions_apart(vae), minutes), loss, log)
    return calibrate(vae.eval(), encode(vae, pool.clips(600)[0]), WHITENING)


def refine(
    vae: AutoencoderKLWan, minutes: float, work: Path, log: Callable[[str], None]
) -> AutoencoderKLWan:
    """Train the decoder alone for ``minutes``.

    The encoder is frozen, so that latents remain those that the denoiser is trained on.
    """
    pool = ClipPool(3)
    for part in (vae.encoder, vae.quant_conv):
        part.requires_grad_(False)
    decoder_parts = torch.nn.ModuleList([vae.post_quant_conv, vae.decoder])

    def loss(_done: float) -> tuple[torch.Tensor, torch.Tensor]:
        clips = pool.clips(CLIPS)[0]
        latents = encode(vae, clips)
        out = unclamped(vae, latents + NOISE * torch.randn_like(latents))
        error = F.mse_loss(out, to_video(clips))
        return F.l1_loss(out, to_video(clips)) + 4 * error, error

    budget = Budget(
        work / "decoder", decoder_parts, convolutions_apart(decoder_parts, REFINED), minutes
    )
    learn_vae(budget, loss, log)
    return vae.eval()


@torch.no_grad()
def encode(vae: AutoencoderKLWan, clips: np.ndarray, batch: int = 100) -> torch.Tensor:
    """Return the posterior means [B, 48, T, 4, 4] of uint8 clips.

    Clips have 4(T - 1) + 1 frames, up to FRAMES.
    """
    assert clips.shape[1] <= FRAMES
    parts = [to_video(clips[i : i + batch]) for i in range(0, len(clips), batch)]
    return torch.cat([vae.encode(part).latent_dist.mode() for part in parts])
