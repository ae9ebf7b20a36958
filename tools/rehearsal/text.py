"""Small text encoders with the published width of output, for a rehearsal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from policy.families.architectures import published

LAYERS = 1


def write_text_encoders(family: str, directory: Path) -> dict[str, list[str]]:
    """Encoders and tokenizers of SANA or SD3.5 Medium with one layer; their rows of the index."""
    return _gemma(directory) if family == "sana" else _sd3(directory)


def _gemma(directory: Path) -> dict[str, list[str]]:
    from transformers import Gemma2Config, Gemma2Model

    from tests.tiny_sana import gemma_tokenizer

    tokenizer = gemma_tokenizer()
    config = {**published("sana-1.6b")["parts"]["text_encoder"]["config"]}
    config |= {"num_hidden_layers": LAYERS, "vocab_size": len(tokenizer)}
    config.pop("layer_types", None)
    _save(Gemma2Model(Gemma2Config(**config)), directory / "text_encoder")
    tokenizer.save_pretrained(directory / "tokenizer")
    return {
        "text_encoder": ["transformers", "Gemma2Model"],
        "tokenizer": ["transformers", "GemmaTokenizer"],
    }


def _sd3(directory: Path) -> dict[str, list[str]]:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    from tests.tiny_sd3 import tiny_clip_tokenizer, tiny_t5_tokenizer

    index: dict[str, list[str]] = {}
    parts = published("sd3.5-medium")["parts"]
    clip, t5 = tiny_clip_tokenizer(77), tiny_t5_tokenizer()
    for suffix in ("", "_2"):
        config = {**parts[f"text_encoder{suffix}"]["config"], "num_hidden_layers": LAYERS}
        config |= {"vocab_size": len(clip), "bos_token_id": 0, "eos_token_id": 1}
        encoder = CLIPTextModelWithProjection(CLIPTextConfig(**config))
        _save(encoder, directory / f"text_encoder{suffix}")
        clip.save_pretrained(directory / f"tokenizer{suffix}")
        index[f"text_encoder{suffix}"] = ["transformers", "CLIPTextModelWithProjection"]
        index[f"tokenizer{suffix}"] = ["transformers", "CLIPTokenizer"]
    config = {**parts["text_encoder_3"]["config"], "num_layers": LAYERS, "vocab_size": 64}
    _save(T5EncoderModel(T5Config(**config)), directory / "text_encoder_3")
    t5.save_pretrained(directory / "tokenizer_3")
    index["text_encoder_3"] = ["transformers", "T5EncoderModel"]
    index["tokenizer_3"] = ["transformers", "T5TokenizerFast"]
    return index


def _save(module: Any, path: Path) -> None:
    import torch

    module.to(torch.bfloat16).save_pretrained(path)
