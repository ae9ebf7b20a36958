"""Pipeline directory with random weights, and the configuration of a one-iteration run."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

from configs.load import parse
from configs.schema import RunConfig
from configs.section import Tree
from policy.families.architectures import build, published

LAYERS = 1
"""Number of layers of each text encoder; its output has the published width."""


def config_of(name: str, model: Path, root: Path, pixels: int) -> RunConfig:
    """Return a configuration of minimal work: one prompt, 2 of 4 seeds and one step each."""
    prompts, others = root / "prompts.txt", root / "held_out.txt"
    prompts.write_text("a red circle\n")
    others.write_text("a blue square\n")
    one = {"actors": 1, "threads": 2, "deadline_s": 3600}
    tree: Tree = {
        "name": f"rehearsal-{name}",
        "run_root": str(root / "runs"),
        "iterations": 1,
        "model": {
            "family": published(name)["family"],
            "path": str(model),
            "height": pixels,
            "width": pixels,
            "max_sequence_length": 32,
        },
        "prompts": {"train": str(prompts), "test": str(others), "per_iteration": 1},
        "explore": {
            **{"pool_size": 4, "steps": 1, "chunk_size": 2, "backend": "emulated_nvfp4"},
            "scale_search": False,
        },
        "selection": {"keep": 2},
        "regenerate": {"steps": 1, "precision": "bf16", "batch_size": 2},
        "evaluate": {"every": 0, "steps": 1, "solver": "euler", "prompts": 1, "noises": 1},
        "rewards": {"scorers": [{"name": "jpeg_compressibility"}]},
        "objective": {"times_per_sample": 1},
        "optimizer": {"batch_size": 1, "gradient_checkpointing": True},
        "services": {
            "rollout": one,
            "learner": {**one, "deadline_s": 6 * 3600},
            "encoder": one,
            "start_deadline_s": 1800,
        },
    }
    return parse(tree)


def write_pipeline(name: str, directory: Path) -> None:
    """Write a pipeline directory of SANA or SD3.5 Medium with random weights."""
    import torch

    model = published(name)
    index: Tree = {"_class_name": model["pipeline"]}
    torch.manual_seed(0)
    for part, dtype in (("transformer", torch.bfloat16), ("vae", torch.float32)):
        module: Any = build(model["parts"][part], "cpu", dtype)
        module.save_pretrained(directory / part)
        index[part] = model["parts"][part]["class"].split(".")
        del module
        gc.collect()
    scheduler = model["parts"]["scheduler"]
    index["scheduler"] = scheduler["class"].split(".")
    (directory / "scheduler").mkdir()
    (directory / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler["config"]))
    index |= _gemma(directory) if model["family"] == "sana" else _sd3(directory)
    (directory / "model_index.json").write_text(json.dumps(index))


def _gemma(directory: Path) -> dict[str, list[str]]:
    """Save SANA's text encoder, with one layer, and its tokenizer; return their index entries."""
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
    """Save SD3.5 Medium's text encoders and tokenizers, three each; return their index entries."""
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
