"""A tiny decoder of latents with random weights."""

from pathlib import Path

import torch
from diffusers import AutoencoderTiny

from tests.tiny_sd3 import TINY_LATENT


def write_tiny_decoder(directory: Path, channels: int = TINY_LATENT[0], stages: int = 2) -> str:
    """Write an AutoencoderTiny. Each of its stages but the first doubles height and width."""
    torch.manual_seed(0)
    AutoencoderTiny(
        encoder_block_out_channels=(4,) * stages,
        decoder_block_out_channels=(8,) * stages,
        latent_channels=channels,
        num_encoder_blocks=(1,) * stages,
        num_decoder_blocks=(1,) * stages,
        # published files contain the shift of their model, which a tiny decoder does not apply
        shift_factor=0.5,
    ).save_pretrained(directory)
    return str(directory)
