"""Train a tiny decoder for the shipped model's latents.

    python -m shapes.decoder_build --minutes 13 --threads 1 --out shapes/decoder

An AutoencoderTiny learns to reproduce the images that the model's own autoencoder decodes, from
latents of random train scenes with a little noise. It decodes proxy images if ``explore.decoder =
"tiny"``; its encoder is not trained. Everything is FP32, on the CPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, AutoencoderTiny

from shapes.building import HERE, log, parser, replacing
from shapes.checksum import checksum
from shapes.data import Pool
from shapes.vae import CHANNELS, encode

WIDTH, STAGES = 16, 3
BATCH, POOL = 32, 8000
PEAK_LR = 3e-3
NOISE = 0.1
"""Deviation of the noise added to latents of variance 1: generated latents are not clean."""


def build_decoder() -> AutoencoderTiny:
    """Return an untrained decoder from [12, 8, 8] to [3, 32, 32].

    Decoding uses 28,000 parameters.
    """
    return AutoencoderTiny(
        encoder_block_out_channels=(4,) * STAGES,
        decoder_block_out_channels=(WIDTH,) * STAGES,
        latent_channels=CHANNELS,
        num_encoder_blocks=(1,) * STAGES,
        num_decoder_blocks=(1,) * STAGES,
    )


def train_decoder(
    vae: AutoencoderKL, minutes: float, log: Callable[[str], None]
) -> AutoencoderTiny:
    """Train for ``minutes`` of wall-clock time.

    The loss is L1 + 4 L2 against the images that ``vae`` decodes.
    """
    torch.manual_seed(2)
    decoder: Any = build_decoder()
    parameters = list(decoder.decoder.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.0)
    rng = np.random.default_rng(3)
    latents = encode(vae, Pool(3).images(POOL)[0])
    latents += NOISE * torch.randn_like(latents)
    images = drawn_by(vae, latents)
    start, step, spent = time.monotonic(), 0, 0.0
    while spent < minutes * 60:
        done = spent / (minutes * 60)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * done))
        rows = torch.from_numpy(rng.integers(0, len(latents), BATCH))
        drawn = decoder.decode(latents[rows]).sample
        mse = F.mse_loss(drawn, images[rows])
        loss = F.l1_loss(drawn, images[rows]) + 4 * mse
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step, spent = step + 1, time.monotonic() - start
        if step % 100 == 0:
            psnr = 10 * math.log10(4 / mse.item())
            log(f"step {step} {spent:.0f}s loss {loss.item():.4f} psnr {psnr:.2f} dB")
    return decoder.eval()


@torch.no_grad()
def drawn_by(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Decode latents [B, 12, 8, 8] to images [B, 3, 32, 32], about in [-1, 1]."""
    return torch.cat([vae.decode(part).sample for part in latents.split(100)])


@torch.no_grad()
def psnr(vae: AutoencoderKL, decoder: AutoencoderTiny, count: int = 300) -> float:
    """Return the PSNR in dB of the decoder's images against the autoencoder's.

    It is measured on ``count`` random scenes with another seed than that of training.
    """
    latents = encode(vae, Pool(4).images(count)[0])
    mse = F.mse_loss(drawn_by(decoder, latents), drawn_by(vae, latents))
    return 10 * math.log10(4 / mse.item())


def main() -> None:
    """Run the build."""
    arg_parser = parser("shapes.decoder_build", __doc__, 13.0, "", HERE / "decoder", threads=1)
    arg_parser.add_argument("--model", type=Path, default=HERE / "model", help="pipeline directory")
    args = arg_parser.parse_args()
    torch.set_num_threads(args.threads)
    vae = AutoencoderKL.from_pretrained(args.model / "vae").eval().requires_grad_(False)
    decoder = train_decoder(vae, args.minutes, log)
    with replacing(args.out) as fresh:
        decoder.save_pretrained(fresh)
    log(f"wrote {args.out}: {psnr(vae, decoder):.1f} dB, checksum {checksum(args.out)}")


if __name__ == "__main__":
    main()
