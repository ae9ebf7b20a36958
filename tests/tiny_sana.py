"""A SanaPipeline directory with random weights, like ``tests.tiny_sd3``.

Width 32; its 1x1 convolutions have K = 32 and 80. Images are 32x32, the smallest of the stock
pipeline; latents [4, 8, 8].
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.tiny_qwen_image import randomise
from tests.tiny_sd3 import WORDS

if TYPE_CHECKING:
    from diffusers import AutoencoderDC
    from transformers import Gemma2Model, GemmaTokenizer

BLOCKS = {
    **{"in_channels": 4, "out_channels": 4, "num_layers": 2, "sample_size": 8},
    **{"num_attention_heads": 2, "attention_head_dim": 16},
    **{"num_cross_attention_heads": 2, "cross_attention_head_dim": 16},
    **{"cross_attention_dim": 32, "caption_channels": 16},
}
SANA_PIXELS = 32
SANA_LATENT = (4, 8, 8)


@pytest.fixture(scope="session")
def tiny_sana_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny pipeline, shared by the session and read-only."""
    return make_tiny_sana(tmp_path_factory.mktemp("tiny_sana"))


def make_tiny_sana(path: str | Path, seed: int = 0, euler: bool = False) -> Path:
    """Write the pipeline directory and return its path; equal seeds give equal weights.

    ``euler`` replaces the scheduler.
    """
    import torch
    from diffusers import (
        DPMSolverMultistepScheduler,
        FlowMatchEulerDiscreteScheduler,
        SanaPipeline,
        SanaTransformer2DModel,
    )

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer = SanaTransformer2DModel(**BLOCKS)
        randomise(transformer)
        dpm = DPMSolverMultistepScheduler(
            flow_shift=3.0, use_flow_sigmas=True, prediction_type="flow_prediction"
        )
        pipe = SanaPipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0) if euler else dpm,
            vae=_vae(),
            text_encoder=tiny_gemma(),
            tokenizer=gemma_tokenizer(),
        )
        pipe.save_pretrained(str(path))
    return Path(path)


def _vae() -> AutoencoderDC:
    from diffusers import AutoencoderDC

    return AutoencoderDC(
        latent_channels=4,
        attention_head_dim=8,
        encoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8, 16),
        decoder_block_out_channels=(8, 8, 16),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), (5,)),
        decoder_qkv_multiscales=((), (), (5,)),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        scaling_factor=0.41407,
    ).eval()


def tiny_gemma() -> Gemma2Model:
    from transformers import Gemma2Config, Gemma2Model

    config = Gemma2Config(
        vocab_size=len(_gemma_vocab()[0]),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        max_position_embeddings=4096,
        sliding_window=16,
    )
    return Gemma2Model(config).eval()


def _gemma_vocab() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return special tokens, letters, and merges that spell WORDS followed by the space mark."""
    tokens = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<mask>",
        "▁",
        *"abcdefghijklmnopqrstuvwxyz0123456789.,:-'\"\n",
    ]
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        left = word[0]
        for letter in word[1:]:
            if (left, letter) not in merges:
                merges.append((left, letter))
            left += letter
            tokens += [] if left in tokens else [left]
    return {token: index for index, token in enumerate(tokens)}, merges


def gemma_tokenizer() -> GemmaTokenizer:
    """Return a tokenizer of letters, with the merges that spell WORDS."""
    from transformers import GemmaTokenizer

    vocab, merges = _gemma_vocab()
    return GemmaTokenizer(vocab=vocab, merges=merges, model_max_length=4096)
