"""A WanPipeline directory with random weights, like ``tests.tiny_sd3``.

Width 32, so that K is 32 and 64 in the blocks' linears. Clips are 5 frames of 16x16: latents [4, 2,
4, 4], as the autoencoder makes 4 frames of each latent frame but the first. Latents of Wan 2.2 are
[6, 2, 2, 2], in patches of 2 x 2 pixels as in the published models.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.tiny_sd3 import T5, randomise_vectors, tiny_t5_tokenizer

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5EncoderModel

SCHEDULERS = ("FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler")


@pytest.fixture(scope="session")
def tiny_wan_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny pipeline, shared by the session and read-only."""
    return make_tiny_wan(tmp_path_factory.mktemp("tiny_wan"))


def make_tiny_wan(
    path: str | Path,
    seed: int = 0,
    scheduler: str = SCHEDULERS[0],
    wan22: bool = False,
    experts: bool = False,
) -> Path:
    """Write the pipeline directory and return its path; equal seeds give equal weights.

    ``scheduler`` is the class of its scheduler; published pipelines have the multistep one.
    ``wan22``: like Wan 2.2 TI2V 5B, which gives each token its own timestep. ``experts``: like Wan
    2.2 A14B, with two transformers.
    """
    import diffusers
    import torch
    from diffusers import WanPipeline

    flow = {"flow_shift": 3.0, "use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    settings = {"shift": 3.0} if scheduler == SCHEDULERS[0] else flow
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        channels = 6 if wan22 else 4
        pipe = WanPipeline(
            transformer=_transformer(channels),
            scheduler=getattr(diffusers, scheduler)(**settings),
            vae=tiny_wan22_vae() if wan22 else tiny_video_vae(),
            text_encoder=_umt5(),
            tokenizer=tiny_t5_tokenizer(),
            expand_timesteps=wan22,
            transformer_2=_transformer(channels) if experts else None,
            boundary_ratio=0.875 if experts else None,
        )
        pipe.save_pretrained(str(path))
    return Path(path)


def _transformer(channels: int) -> WanTransformer3DModel:
    from diffusers import WanTransformer3DModel

    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=channels,
        out_channels=channels,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=32,
    )
    randomise_vectors(transformer)
    return transformer


def tiny_video_vae() -> AutoencoderKLWan:
    """Return an autoencoder with 4 frames per latent frame but the first, and 4 x 4 pixels per
    latent pixel.
    """
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.5, 2.0, 0.7, 1.1],
        scale_factor_temporal=4,
        scale_factor_spatial=4,
    ).eval()


def tiny_wan22_vae() -> AutoencoderKLWan:
    """Return a residual autoencoder with patches of 2 x 2 pixels: 8 x 8 pixels per latent pixel."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=8,
        z_dim=6,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0, -0.1, 0.2],
        latents_std=[1.5, 2.0, 0.7, 1.1, 0.9, 1.3],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_temporal=4,
        scale_factor_spatial=8,
    ).eval()


def _umt5() -> UMT5EncoderModel:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(**T5)).eval()
