"""A ZImagePipeline directory with random weights, like ``tests.tiny_sd3``.

Width 48, so that K is 48 and 128 in the blocks' linears. Images are 16x16, latents [4, 8, 8].
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_qwen_image import randomise, tiny_qwen_tokenizer
from tests.tiny_sd3 import tiny_vae


@pytest.fixture(scope="session")
def tiny_z_image_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny pipeline, shared by the session and read-only."""
    return make_tiny_z_image(tmp_path_factory.mktemp("tiny_z_image"))


def make_tiny_z_image(path: str | Path, seed: int = 0) -> Path:
    """Write the pipeline directory and return its path; equal seeds give equal weights."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
    from transformers import Qwen3Config, Qwen3Model

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer = ZImageTransformer2DModel(
            in_channels=4,
            dim=48,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=3,
            n_kv_heads=3,
            cap_feat_dim=32,
            axes_dims=[4, 4, 8],
            axes_lens=[128, 16, 16],
        )
        randomise(transformer)
        tokenizer = tiny_qwen_tokenizer()
        text = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
        )
        pipe = ZImagePipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=tiny_vae(),
            text_encoder=Qwen3Model(text).eval(),
            tokenizer=tokenizer,
        )
        pipe.save_pretrained(str(path))
    return Path(path)
