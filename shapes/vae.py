"""Autoencoder of images: diffusers' AutoencoderKL with 12 channels at a quarter of each side.

It maps [3, 32, 32] to [12, 8, 8].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, AutoencoderKLWan

from shapes.budget import Budget
from shapes.data import Pool
from shapes.muon import Muon

BLOCKS = (16, 24, 32)
CHANNELS = 12
KL_WEIGHT = 1e-6  # 2e-5 turned crosses into diamonds
WHITENING = 0.4
"""Exponent of the variances in ``calibrate``.

0.5 would give every direction variance 1, and the faintest as much weight as the strongest.
"""
BATCH = 48
PEAK_LR = 3e-3
AE = TypeVar("AE", AutoencoderKL, AutoencoderKLWan)


def build_vae() -> AutoencoderKL:
    """Return an untrained autoencoder of about 0.2 M parameters."""
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
    """Convert uint8 [B, 3, H, W] to float32 in [-1, 1]."""
    return torch.from_numpy(images).float() / 127.5 - 1.0


def vae_loss(vae: AutoencoderKL, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, mean squared error) of one batch in [-1, 1].

    The loss is L1 + 4 L2 plus a small KL term that keeps latents near unit scale.
    """
    latent = vae.encode(x).latent_dist
    out = vae.decode(latent.sample()).sample
    mse = F.mse_loss(out, x)
    return F.l1_loss(out, x) + 4 * mse + KL_WEIGHT * latent.kl().mean(), mse


def train_vae(pool: Pool, minutes: float, work: Path, log: Callable[[str], None]) -> AutoencoderKL:
    """Train for ``minutes`` of wall-clock time (counted over resumed runs).

    The learning rate depends on the share of the time that has passed.
    """
    torch.manual_seed(1)
    vae = build_vae()
    groups = [{"params": list(vae.parameters()), "peak": PEAK_LR}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.0)
    budget = Budget(work / "vae", vae, optimizer, minutes)
    learn_vae(budget, lambda _: vae_loss(vae, to_float(pool.images(BATCH)[0])), log)
    return calibrate(vae.eval(), encode(vae, pool.images(2000)[0]))


def learn_vae(
    budget: Budget,
    loss: Callable[[float], tuple[torch.Tensor, torch.Tensor]],
    log: Callable[[str], None],
) -> None:
    """Train ``budget.model`` on ``loss(done)``, which returns (loss, mean squared error).

    The learning rate of each group falls from its "peak" along a cosine.
    """
    for done in budget:
        rate = min(1.0, (budget.step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * done))
        for group in budget.optimizer.param_groups:
            group["lr"] = group["peak"] * rate
        value, mse = loss(done)
        budget.optimizer.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(budget.model.parameters(), 1.0)
        budget.optimizer.step()
        if budget.step % 50 == 49:
            decibels = 10 * math.log10(4 / mse.item())
            log(f"{budget.path.name} {budget.where} loss {value.item():.4f} psnr {decibels:.2f} dB")


def convolutions_apart(vae: torch.nn.Module, rate: float = 1.0) -> Muon:
    """Return Muon for convolutions with AdamW for norms and biases.

    With it the clips' autoencoder reached 27 dB in 400 steps, with AdamW alone 20 dB.
    """
    split: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for p in vae.parameters():
        split[p.ndim >= 4 and min(p.flatten(1).shape) > 1].append(p)
    return Muon(split[True], split[False], 0.02 * rate, PEAK_LR * rate, decay=0.0)


@torch.no_grad()
def calibrate(vae: AE, latents: torch.Tensor, whitening: float = WHITENING) -> AE:
    """Decorrelate the latent channels: mean 0, and variances about 1.

    ``latents`` [B, C, ...] are the posterior means of some images. A rotation and scales are folded
    into the autoencoder's 1x1 convolutions. quant_conv returns the posterior's mean and
    log-variance; only the rows of the mean are rotated, and the log-variance is set to a constant,
    because no sampling happens after training. post_quant_conv undoes the rotation exactly.
    """
    channels = latents.shape[1]
    flat = latents.transpose(0, 1).reshape(channels, -1).double()
    mean = flat.mean(1, keepdim=True)
    values, vectors = torch.linalg.eigh((flat - mean) @ (flat - mean).T / flat.shape[1])
    gain = values.pow(-whitening)
    gain *= (channels / (gain**2 * values).sum()).sqrt()  # mean variance 1
    rotate, rotate_back = torch.diag(gain) @ vectors.T, vectors @ torch.diag(1 / gain)
    quant, post_quant = vae.quant_conv, vae.post_quant_conv
    weight, bias = quant.weight[:channels].flatten(1).double(), quant.bias[:channels].double()
    quant.weight[:channels] = (rotate @ weight).float().view_as(quant.weight[:channels])
    quant.bias[:channels] = (rotate @ (bias - mean[:, 0])).float()
    quant.weight[channels:], quant.bias[channels:] = 0.0, -10.0
    post_weight = post_quant.weight.flatten(1).double()
    post_quant.bias.copy_((post_quant.bias.double() + post_weight @ mean[:, 0]).float())
    post_quant.weight.copy_((post_weight @ rotate_back).float().view_as(post_quant.weight))
    return vae


@torch.no_grad()
def encode(vae: AutoencoderKL, images: np.ndarray, batch: int = 250) -> torch.Tensor:
    """Return the posterior means [B, 12, 8, 8] of uint8 images."""
    return torch.cat(
        [
            vae.encode(to_float(images[i : i + batch])).latent_dist.mode()
            for i in range(0, len(images), batch)
        ]
    )
