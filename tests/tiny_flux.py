"""A FluxPipeline directory with random weights, like ``tests.tiny_sd3``.

Width 32, so that K is 32, 128 and 160 in the blocks' linears. Images are 16x16: latents of 8x8
pixels, packed to [16, 16].
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_sd3 import (
    randomise_vectors,
    tiny_clip_config,
    tiny_clip_tokenizer,
    tiny_t5,
    tiny_t5_tokenizer,
    tiny_vae,
)

FLUX_LATENT = (16, 16)


@pytest.fixture(scope="session")
def tiny_flux_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny pipeline, shared by the session and read-only."""
    return make_tiny_flux(tmp_path_factory.mktemp("tiny_flux"))


@pytest.fixture(scope="session")
def tiny_flux_kontext_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the same as a FluxKontextPipeline."""
    return make_tiny_flux(tmp_path_factory.mktemp("tiny_flux_kontext"), kontext=True)


def make_tiny_flux(path: str | Path, seed: int = 0, kontext: bool = False) -> Path:
    """Write the pipeline directory and return its path; equal seeds give equal weights."""
    import torch
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        FluxKontextPipeline,
        FluxPipeline,
        FluxTransformer2DModel,
    )
    from transformers import CLIPTextModel

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=16,
            guidance_embeds=True,
            axes_dims_rope=(4, 4, 8),
        )
        randomise_vectors(transformer)
        pipe = (FluxKontextPipeline if kontext else FluxPipeline)(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(
                shift=3.0,
                use_dynamic_shifting=True,
                base_shift=0.5,
                max_shift=1.15,
                base_image_seq_len=256,
                max_image_seq_len=4096,
            ),
            vae=tiny_vae(),
            text_encoder=CLIPTextModel(tiny_clip_config()).eval(),
            tokenizer=tiny_clip_tokenizer(),
            text_encoder_2=tiny_t5(),
            tokenizer_2=tiny_t5_tokenizer(),
        )
        pipe.save_pretrained(str(path))
    return Path(path)
