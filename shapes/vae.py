"""The image's autoencoder: diffusers' AutoencoderKL, four times smaller each way, 12 channels:
[3, 32, 32] to [12, 8, 8].
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL

from shapes.data import Pool
from shapes.state import load_state, save_state

BLOCKS = (16, 24, 32)
CHANNELS = 12
KL_WEIGHT = 1e-6  # 2e-5 turned crosses into diamonds
WHITENING = 0.4
"""0.5 would give every direction variance 1, and the faintest as much weight as the strongest."""
BATCH = 48
PEAK_LR = 3e-3


def build_vae() -> AutoencoderKL:
    """An untrained autoencoder, about 0.2 M parameters."""
    count = len(BLOCKS)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * count,
        up_block_types=("UpDecoderBlock2D",) * count,
        block_out_channels=BLOCKS,
        layers_per_block=1,
        latent_channels=CHANNELS,
        norm_num_groups=8,
        sample_size=32,
        mid_block_add_attention=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def to_float(images: np.ndarray) -> torch.Tensor:
    """uint8 [B, 3, H, W] to float32 in [-1, 1]."""
    return torch.from_numpy(images).float() / 127.5 - 1.0


def vae_loss(vae: AutoencoderKL, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, mean squared error) of one batch in [-1, 1]: L1 + 4 L2 + a small KL term that keeps
    latents near unit scale.
    """
    latent = vae.encode(x).latent_dist
    out = vae.decode(latent.sample()).sample
    mse = F.mse_loss(out, x)
    return F.l1_loss(out, x) + 4 * mse + KL_WEIGHT * latent.kl().mean(), mse


def train_vae(pool: Pool, minutes: float, work: Path, log: Callable[[str], None]) -> AutoencoderKL:
    """Train for ``minutes`` of wall clock (counted over resumed runs), learning rate by the share
    of them that is gone.
    """
    torch.manual_seed(1)
    vae = build_vae()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.0)
    state = load_state(work / "vae", vae, optimizer)
    spent, step = state.get("spent", 0.0), int(state.get("step", 0))
    begin, saved = time.monotonic() - spent, time.monotonic()
    while spent < minutes * 60:
        done = spent / (minutes * 60)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * done))
        loss, mse = vae_loss(vae, to_float(pool.images(BATCH)[0]))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        step, spent = step + 1, time.monotonic() - begin
        if step % 50 == 0:
            log(
                f"vae step {step} {spent:.0f}s loss {loss.item():.4f} psnr"
                f" {10 * math.log10(4 / mse.item()):.2f} dB"
            )
        if time.monotonic() - saved > 60 or spent >= minutes * 60:
            save_state(work / "vae", vae, optimizer, {"spent": spent, "step": step})
            saved = time.monotonic()
    return calibrate(vae.eval(), pool)


@torch.no_grad()
def calibrate(vae: AutoencoderKL, pool: Pool, count: int = 2000) -> AutoencoderKL:
    """Make the latents' channels uncorrelated, with mean 0 and variances about 1, by folding a
    rotation and scales into the 1x1 convolutions.

    x -> quant_conv gives the posterior's mean and log-variance; only the mean's rows are rotated,
    the log-variance is set to a constant (sampling is not used after training). post_quant_conv
    undoes the rotation exactly.
    """
    latents = encode(vae, pool.images(count)[0])
    flat = latents.permute(1, 0, 2, 3).reshape(CHANNELS, -1).double()
    mean = flat.mean(1, keepdim=True)
    values, vectors = torch.linalg.eigh((flat - mean) @ (flat - mean).T / flat.shape[1])
    gain = values.pow(-WHITENING)
    gain *= (CHANNELS / (gain**2 * values).sum()).sqrt()  # mean variance 1
    forward, backward = torch.diag(gain) @ vectors.T, vectors @ torch.diag(1 / gain)
    into, out = vae.quant_conv, vae.post_quant_conv
    weight = into.weight[:CHANNELS, :, 0, 0].double()
    bias = into.bias[:CHANNELS].double()
    into.weight[:CHANNELS] = (forward @ weight).float()[:, :, None, None]
    into.bias[:CHANNELS] = (forward @ (bias - mean[:, 0])).float()
    into.weight[CHANNELS:], into.bias[CHANNELS:] = 0.0, -10.0
    old = out.weight[:, :, 0, 0].double()
    out.bias.copy_((out.bias.double() + old @ mean[:, 0]).float())
    out.weight.copy_((old @ backward).float()[:, :, None, None])
    return vae


@torch.no_grad()
def encode(vae: AutoencoderKL, images: np.ndarray, batch: int = 250) -> torch.Tensor:
    """Posterior means [B, 12, 8, 8] of uint8 images."""
    return torch.cat(
        [
            vae.encode(to_float(images[i : i + batch])).latent_dist.mode()
            for i in range(0, len(images), batch)
        ]
    )
