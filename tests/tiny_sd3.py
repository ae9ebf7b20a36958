"""A StableDiffusion3Pipeline directory with random weights: all real classes, some hundred
kilobytes.

It takes a second to make. Other tiny pipelines use its autoencoder, text encoders and tokenizers
too.

The width is 32, and K = 32 and 64 in the blocks' linears, so that each divides into NVFP4 blocks of
16. Images are 16x16, latents [4, 8, 8]; CLIP texts have 16 tokens. torch and diffusers are imported
inside functions, so that a conftest can import the fixture at no cost.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, SD3Transformer2DModel
    from torch import nn
    from transformers import (
        CLIPTextConfig,
        CLIPTextModelWithProjection,
        CLIPTokenizer,
        T5EncoderModel,
        T5TokenizerFast,
    )

TINY_HEIGHT = TINY_WIDTH = 16
TINY_LATENT = (4, 8, 8)
TINY_SEQUENCE = 12
WORDS = [
    "a",
    "red",
    "green",
    "blue",
    "circle",
    "square",
    "triangle",
    "cross",
    "two",
    "three",
    "left",
    "of",
    "right",
    "above",
    "below",
    "and",
]


@pytest.fixture(scope="session")
def tiny_sd3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny pipeline, shared by the session and read-only."""
    return make_tiny_sd3(tmp_path_factory.mktemp("tiny_sd3"))


def make_tiny_sd3(
    path: str | Path, seed: int = 0, dual: tuple[int, ...] = (), heads: int = 2
) -> Path:
    """Write the pipeline directory and return its path; equal seeds give equal weights.

    ``dual``: blocks with a second attention over the image alone, as in the first half of SD3.5
    Medium. ``heads``: number of attention heads, each 16 wide; with 32 there are 13 million
    weights.

    The transformer's biases and norm weights are random too (their stock initial values are 0 and
    1), so that a test cannot pass if some part of the network is left out.
    """
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer = _transformer(dual, heads)
        randomise_vectors(transformer)
        pipe = StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=tiny_vae(),
            text_encoder=_clip(),
            tokenizer=tiny_clip_tokenizer(),
            text_encoder_2=_clip(),
            tokenizer_2=tiny_clip_tokenizer(),
            text_encoder_3=tiny_t5(),
            tokenizer_3=tiny_t5_tokenizer(),
        )
        pipe.save_pretrained(str(path))
    return Path(path)


def randomise_vectors(transformer: nn.Module) -> None:
    """Draw biases near 0, and norm weights near 1."""
    for name, parameter in transformer.named_parameters():
        if parameter.ndim == 1:
            parameter.data.normal_(1.0 if "norm_" in name and name.endswith("weight") else 0.0, 0.1)


def _transformer(dual: tuple[int, ...], heads: int) -> SD3Transformer2DModel:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=heads,
        joint_attention_dim=32,
        caption_projection_dim=16 * heads,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
        dual_attention_layers=dual,
    )


def tiny_vae() -> AutoencoderKL:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=TINY_HEIGHT,
        scaling_factor=1.5305,
        shift_factor=0.0609,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def tiny_clip_config() -> CLIPTextConfig:
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        vocab_size=len(tiny_clip_vocab()[0]),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        projection_dim=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        hidden_act="gelu",
    )


def _clip() -> CLIPTextModelWithProjection:
    from transformers import CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(tiny_clip_config()).eval()


def tiny_clip_vocab() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return letters, letters that end a word, and the merges that spell WORDS."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,"
    tokens = [
        "<|startoftext|>",
        "<|endoftext|>",
        *letters,
        *(f"{letter}</w>" for letter in letters),
    ]
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            pair = (parts[0], parts[1])
            merges += [] if pair in merges else [pair]
            tokens += [] if "".join(pair) in tokens else ["".join(pair)]
            parts[:2] = ["".join(pair)]
    return {token: index for index, token in enumerate(tokens)}, merges


def tiny_clip_tokenizer(length: int = 16) -> CLIPTokenizer:
    from transformers import CLIPTokenizer

    vocab, merges = tiny_clip_vocab()
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=length)


T5 = {
    **{"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    **{"pad_token_id": 0, "eos_token_id": 1},
}


def tiny_t5() -> T5EncoderModel:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(**T5)).eval()


def tiny_t5_tokenizer() -> T5TokenizerFast:
    from transformers import T5TokenizerFast

    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    vocab += [(f"▁{word}", -2.0) for word in WORDS if word != "a"]
    vocab += [(letter, -6.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    return T5TokenizerFast(vocab=vocab, extra_ids=0)
