"""A WanPipeline directory with random weights, after the pattern of ``tests.tiny_sd3``.

Width 32, so that K is 32 and 64 in the blocks' linears. Clips are 5 frames of 16x16: latents
[4, 2, 4, 4], as the autoencoder makes 4 frames of each but the first. Of Wan 2.2 they are
[6, 2, 2, 2], of patches of 2 x 2 pixels as the published ones.
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
    """The directory of one tiny pipeline, shared by the session: read it, do not write to it."""
    return make_tiny_wan(tmp_path_factory.mktemp("tiny_wan"))


def make_tiny_wan(
    path: str | Path,
    seed: int = 0,
    scheduler: str = SCHEDULERS[0],
    wan22: bool = False,
    experts: bool = False,
) -> Path:
    """Write the pipeline directory and return its path. The same seed gives the same weights.

    ``scheduler`` is the class of its scheduler; published pipelines have the multistep one.
    ``wan22``: as Wan 2.2 TI2V 5B, which tells each token its timestep. ``experts``: as Wan 2.2
    A14B, of two transformers.
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
    """4 frames of each latent frame but the first, 4 x 4 pixels of each latent pixel."""
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
    """Residual, and of patches of 2 x 2 pixels: 8 x 8 pixels of each latent pixel."""
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
