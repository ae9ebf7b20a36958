"""A QwenImagePipeline directory with random weights, like ``tests.tiny_sd3``.

Other tiny pipelines with Qwen's text encoders use its tokenizer too. Images are 16x16: latents of
8x8 pixels, packed to [16, 16].
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.tiny_sd3 import WORDS

if TYPE_CHECKING:
    from torch import nn
    from transformers import Qwen2Tokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
VISION = ["<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"]
PATCH = 48
"""Patches so large that an image of 384x384 pixels is 16 tokens, of 2x2 patches each."""
MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|image|>", "<|video|>")


@pytest.fixture(scope="session")
def tiny_qwen_image_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny pipeline, shared by the session and read-only."""
    return make_tiny_qwen_image(tmp_path_factory.mktemp("tiny_qwen_image"))


@pytest.fixture(scope="session")
def tiny_qwen_image_edit_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the same as a QwenImageEditPlusPipeline, for 32x32 pixels."""
    return make_tiny_qwen_image(tmp_path_factory.mktemp("tiny_qwen_image_edit"), edit=True)


def make_tiny_qwen_image(path: str | Path, seed: int = 0, edit: bool = False) -> Path:
    """Write the pipeline directory and return its path; equal seeds give equal weights."""
    import torch
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImageEditPlusPipeline,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer = QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(4, 4, 8),
        )
        randomise(transformer)
        cls = QwenImageEditPlusPipeline if edit else QwenImagePipeline
        tokenizer = tiny_qwen_tokenizer(cls)
        pipe: Any = cls(
            **({"processor": _processor(tokenizer)} if edit else {}),
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True,
                base_shift=0.5,
                max_shift=0.9,
                base_image_seq_len=256,
                max_image_seq_len=8192,
                shift_terminal=0.02,
            ),
            vae=AutoencoderKLQwenImage(
                base_dim=8,
                z_dim=4,
                dim_mult=[1, 2],
                num_res_blocks=1,
                temperal_downsample=[False],
                latents_mean=[0.1, -0.2, 0.3, 0.0],
                latents_std=[1.5, 2.0, 0.7, 1.1],
            ).eval(),
            text_encoder=_text_encoder(tokenizer),
            tokenizer=tokenizer,
        )
        pipe.save_pretrained(str(path))
    return Path(path)


def randomise(transformer: nn.Module) -> None:
    """Draw biases and padding tokens near 0, and norm weights near 1."""
    for name, parameter in transformer.named_parameters():
        if parameter.ndim == 1 or name.endswith("pad_token"):
            near = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.data.normal_(near, 0.1)


def tiny_qwen_tokenizer(pipeline: type | None = None) -> Qwen2Tokenizer:
    """Return a tokenizer of bytes, and of the words of prompts as single tokens.

    With ``QwenImagePipeline`` the words of its template are single tokens too, so that the template
    has as many tokens as with the published tokenizer: the pipeline drops that many.
    """
    from transformers import AddedToken, Qwen2Tokenizer

    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    vocab = ["<|endoftext|>", *letters, "Ġ", "Ċ"]
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(vocab)},
        merges=[],
        model_max_length=4096,
        chat_template=TEMPLATE,
    )
    words = ["user", "system", "assistant", *(f" {word}" for word in WORDS[1:])]
    if pipeline is not None:
        words += [*re.findall(r" ?[A-Za-z]{2,}", _template(pipeline)), "Picture"]
    marks = [AddedToken(mark, special=True, normalized=False) for mark in (*MARKS, *VISION)]
    tokenizer.add_tokens([*marks, *dict.fromkeys(words)])
    return tokenizer


def _template(pipeline: type) -> str:
    import inspect

    found = re.search(r"prompt_template_encode = \"(.*)\"", inspect.getsource(pipeline))
    assert found is not None
    return re.sub(r"<\|.*?\|>|\\n|\{\}", "\n", found.group(1))


def _processor(tokenizer: Qwen2Tokenizer) -> Any:
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    patches: dict[str, Any] = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**patches),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**patches),
        chat_template=TEMPLATE,
    )


def _text_encoder(tokenizer: Qwen2Tokenizer) -> nn.Module:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    ids: Any = tokenizer.convert_tokens_to_ids(VISION)
    size, (start, image, video, end) = len(tokenizer), ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": size + 4,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [2, 3, 3],
                "rope_theta": 1e6,
            },
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": PATCH,
            "window_size": 4 * PATCH,
            "fullatt_block_indexes": [0],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()
