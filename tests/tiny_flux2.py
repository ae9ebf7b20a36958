"""Flux2Pipeline and Flux2KleinPipeline directories with random weights, like ``tests.tiny_sd3``.

Images are 16x16, latents [16, 4, 4]. The text encoders have as many layers as the pipelines read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.tiny_qwen_image import randomise, tiny_qwen_tokenizer

if TYPE_CHECKING:
    from torch import nn
    from transformers import PixtralProcessor

WIDTH = 16
"""Width of the text encoders; the transformer reads three of their layers."""
MESSAGES = (
    "{% for message in messages %}{% for part in message.content %}"
    "{{ part.text[:4] if message.role == 'system' else part.text }}{% endfor %}{% endfor %}"
)
"""Four letters of the system's message, and the prompt."""


@pytest.fixture(scope="session")
def tiny_flux2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny pipeline, shared by the session and read-only."""
    return make_tiny_flux2(tmp_path_factory.mktemp("tiny_flux2"))


@pytest.fixture(scope="session")
def tiny_flux2_klein_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny klein pipeline, not distilled."""
    return make_tiny_flux2(tmp_path_factory.mktemp("tiny_flux2_klein"), klein=True)


def make_tiny_flux2(
    path: str | Path, seed: int = 0, klein: bool = False, is_distilled: bool = False
) -> Path:
    """Write the pipeline directory and return its path; equal seeds give equal weights."""
    import torch
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinPipeline,
        Flux2Pipeline,
        Flux2Transformer2DModel,
    )

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer = Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=3 * WIDTH,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=not klein,
        )
        randomise(transformer)
        parts: dict[str, Any] = {
            "transformer": transformer,
            "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            "vae": _vae(),
        }
        if klein:
            tokenizer = tiny_qwen_tokenizer()
            text = _qwen3(len(tokenizer))
            pipe = Flux2KleinPipeline(
                **parts, text_encoder=text, tokenizer=tokenizer, is_distilled=is_distilled
            )
        else:
            processor = _processor()
            text = _mistral3(len(processor.tokenizer))
            pipe = Flux2Pipeline(**parts, text_encoder=text, tokenizer=processor)
        pipe.save_pretrained(str(path))
    return Path(path)


def _vae() -> nn.Module:
    from diffusers import AutoencoderKLFlux2

    vae: Any = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
    ).eval()
    vae.bn.running_mean.normal_(0.0, 0.2)
    vae.bn.running_var.uniform_(0.5, 2.0)
    return vae


def _qwen3(size: int) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=size,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=27,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return Qwen3ForCausalLM(config).eval()


def _mistral3(size: int) -> nn.Module:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    config = Mistral3Config(
        text_config={
            "model_type": "mistral",
            "vocab_size": size,
            "hidden_size": WIDTH,
            "intermediate_size": WIDTH,
            "num_hidden_layers": 30,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "sliding_window": None,
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "image_size": 28,
        },
        image_token_index=size - 1,
    )
    return Mistral3ForConditionalGeneration(config).eval()


def _processor() -> PixtralProcessor:
    from transformers import PixtralImageProcessor, PixtralProcessor

    tokenizer = tiny_qwen_tokenizer()
    tokenizer.add_tokens(["[IMG_BREAK]", "[IMG_END]", "[IMG]"], special_tokens=True)
    return PixtralProcessor(PixtralImageProcessor(), tokenizer, chat_template=MESSAGES)
