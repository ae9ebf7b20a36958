"""Images of half the side: what the tiny model's autoencoder has to learn to draw them too.

The shipped autoencoder was trained at 32x32 alone, and its reconstructions of 16x16 images cannot
be read. A copy of it is trained on both sizes here, with its latents at 32x32 held where they are,
so that the shipped denoiser goes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL

from shapes.budget import Budget
from shapes.data import Pool
from shapes.vae import convolutions_apart, encode, learn_vae, to_float

BATCH = 32  # images of each size
HALF = 2.0  # weight of the small images
HOLD = 4.0  # weight of the latents' mean squared distance from the shipped autoencoder's
SPREAD = 2e-3  # weight of the mean square of the half-size latents, whose scale nothing else holds
RATE = 0.5  # of the full learning rates
NOISE = 0.05  # deviation added to latents that are decoded: a denoiser's are not exact


def halved(images: np.ndarray) -> np.ndarray:
    """uint8 [B, 3, H/2, W/2]: the mean of each 2x2 pixels."""
    count, channels, height, width = images.shape
    blocks = images.reshape(count, channels, height // 2, 2, width // 2, 2)
    return np.rint(blocks.astype(np.float32).mean((3, 5))).astype(np.uint8)


def images_of(vae: AutoencoderKL, latents: torch.Tensor) -> np.ndarray:
    """uint8 [B, 3, H, W]."""
    with torch.no_grad():
        out = torch.cat([vae.decode(part).sample for part in latents.split(250)])
    return ((out.clamp(-1, 1) + 1) * 127.5).round().byte().numpy()


def loss_of(
    vae: AutoencoderKL, x: torch.Tensor, latents: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, mean squared error) of images in [-1, 1], of which ``latents`` are to be kept."""
    mode = vae.encode(x).latent_dist.mode()
    out = vae.decode(mode + NOISE * torch.randn_like(mode)).sample
    error = F.mse_loss(out, x)
    held = SPREAD * mode.square().mean() if latents is None else HOLD * F.mse_loss(mode, latents)
    return F.l1_loss(out, x) + 4 * error + held, error


def widen_vae(
    shipped: AutoencoderKL, minutes: float, work: Path, log: Callable[[str], None]
) -> AutoencoderKL:
    """A copy of ``shipped`` trained on both sizes for ``minutes`` (counted over resumed runs)."""
    torch.manual_seed(1)
    vae = AutoencoderKL.from_config(shipped.config)
    vae.load_state_dict(shipped.state_dict())
    pool = Pool(11)

    def loss(_done: float) -> tuple[torch.Tensor, torch.Tensor]:
        images = pool.images(BATCH)[0]
        full, _ = loss_of(vae, to_float(images), encode(shipped, images))
        half, error = loss_of(vae, to_float(halved(pool.images(2 * BATCH)[0])), None)
        return full + HALF * half, error

    learn_vae(Budget(work / "vae", vae, convolutions_apart(vae, RATE), minutes), loss, log)
    return vae.eval()
