"""Published architectures as data, to compute memory and work at real size without weights.

There is one JSON file per model, with the keys of diffusers' and transformers' configuration files.
The source is the models' published config.json files. ``shared.json`` holds configurations that
several models share.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from configs.section import Tree

DIRECTORY = Path(__file__).resolve().parent
SHARED = "shared"
CONFIGS = {
    "CLIPTextModel": "CLIPTextConfig",
    "CLIPTextModelWithProjection": "CLIPTextConfig",
    "Gemma2Model": "Gemma2Config",
    "Mistral3ForConditionalGeneration": "Mistral3Config",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2_5_VLConfig",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Qwen3Model": "Qwen3Config",
    "T5EncoderModel": "T5Config",
    "UMT5EncoderModel": "UMT5Config",
}
"""The configuration class of each class of transformers in the descriptions, its ``config_class``.

Importing a model only to find it takes several seconds.
"""


def published_names() -> list[str]:
    """Return the names of the models that have a description."""
    return sorted(path.stem for path in DIRECTORY.glob("*.json") if path.stem != SHARED)


def published(name: str) -> Tree:
    """Return a model's description: family, pipeline, hub_id, height and width in pixels, parts.

    ``parts`` maps the part names of a diffusers pipeline ("transformer", "vae", "scheduler",
    "text_encoder", "tokenizer", ...) to {"class": "library.Class", "config": {...}}; tokenizers
    have no config. ``index``, if present, has further entries of model_index.json. Raises
    ValueError for an unknown name.
    """
    if name not in published_names():
        raise ValueError(
            f"unknown published architecture {name!r}; available: {', '.join(published_names())}"
        )
    model = json.loads((DIRECTORY / f"{name}.json").read_text())
    shared = json.loads((DIRECTORY / f"{SHARED}.json").read_text())
    for part in model["parts"].values():
        if isinstance(part.get("config"), str):
            part["config"] = shared[part["config"]]
    return model


def build(
    part: Tree, device: torch.device | str = "meta", dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Build a model from an entry of ``published(name)["parts"]``, in eval mode without gradients.

    On "meta" it needs no memory; on other devices its weights are random.
    """
    cls = _class(part)
    with default_dtype(dtype), torch.device(device):
        module = (
            cls.from_config(part["config"]) if _library(part) == "diffusers" else cls(_config(part))
        )
    return module.eval().requires_grad_(False)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype to ``dtype`` within the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def every_published() -> Iterator[tuple[str, Tree]]:
    """Yield (name, description) of every published model and of its variants.

    ``variants`` are other pipelines of the same architecture. The description of a variant is the
    model's, updated with the variant's family, pipeline and parts.
    """
    for name in published_names():
        model = published(name)
        for variant in (model, *model.get("variants", ())):
            yield name, {**model, **variant, "parts": model["parts"] | variant.get("parts", {})}


def find_by_hub_id(hub_id: str) -> tuple[str, Tree] | None:
    """Return (name, description) of the published model with this hub id, or None."""
    return next((each for each in every_published() if each[1]["hub_id"] == hub_id), None)


def write_configs(model: Tree, directory: str | Path) -> Path:
    """Write a pipeline directory of configuration files for a ``Family`` to read; return its path.

    ``model`` is a description from ``published`` or ``find_by_hub_id``. The directory has no
    weights, and tokenizers are empty directories.
    """
    root = Path(directory)
    index: Tree = {"_class_name": model["pipeline"], **model.get("index", {})}
    for key, part in model["parts"].items():
        index[key] = part["class"].split(".")
        target = root / key
        target.mkdir(parents=True, exist_ok=True)
        if _library(part) == "diffusers":
            file = "scheduler_config.json" if key == "scheduler" else "config.json"
            (target / file).write_text(
                json.dumps({"_class_name": index[key][1], **part["config"]}, indent=2)
            )
        elif "config" in part:
            _config(part).save_pretrained(target)
    (root / "model_index.json").write_text(json.dumps(index, indent=2))
    return root


def _library(part: Tree) -> str:
    return part["class"].split(".")[0]


def _class(part: Tree) -> Any:
    library, name = part["class"].split(".")
    return getattr(import_module(library), name)


def _config(part: Tree) -> Any:
    """Return the configuration of a part that is a model of transformers."""
    library, name = part["class"].split(".")
    return getattr(import_module(library), CONFIGS[name])(**part["config"])
