"""Images of half the side, and an autoencoder that can encode and decode them too.

The shipped autoencoder was trained at 32x32 only, and its reconstructions of 16x16 images are
unrecognizable. Here a copy is trained on both sizes. Its latents at 32x32 are kept close to the
shipped ones, so that the shipped denoiser works with them.
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
HOLD = 4.0  # weight of the mean squared distance to the shipped autoencoder's latents
SPREAD = 2e-3  # weight of the half-size latents' mean square; nothing else limits their scale
RATE = 0.5  # factor on the full learning rates
NOISE = 0.05  # deviation of noise on decoded latents, because a denoiser's are not exact


def halved(images: np.ndarray) -> np.ndarray:
    """Scale images down to uint8 [B, 3, H/2, W/2] by averaging each 2x2 block."""
    count, channels, height, width = images.shape
    blocks = images.reshape(count, channels, height // 2, 2, width // 2, 2)
    return np.rint(blocks.astype(np.float32).mean((3, 5))).astype(np.uint8)


def images_of(vae: AutoencoderKL, latents: torch.Tensor) -> np.ndarray:
    """Decode latents to images uint8 [B, 3, H, W]."""
    with torch.no_grad():
        out = torch.cat([vae.decode(part).sample for part in latents.split(250)])
    return ((out.clamp(-1, 1) + 1) * 127.5).round().byte().numpy()


def loss_of(
    vae: AutoencoderKL, x: torch.Tensor, latents: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, mean squared error) for images ``x`` in [-1, 1].

    With ``latents``, the encoder's latents are pulled towards these; without, towards zero.
    """
    mode = vae.encode(x).latent_dist.mode()
    out = vae.decode(mode + NOISE * torch.randn_like(mode)).sample
    error = F.mse_loss(out, x)
    penalty = SPREAD * mode.square().mean() if latents is None else HOLD * F.mse_loss(mode, latents)
    return F.l1_loss(out, x) + 4 * error + penalty, error


def widen_vae(
    shipped: AutoencoderKL, minutes: float, work: Path, log: Callable[[str], None]
) -> AutoencoderKL:
    """Train a copy of ``shipped`` on both sizes and return it.

    ``minutes`` are counted over resumed runs.
    """
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
