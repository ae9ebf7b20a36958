"""Published architectures as data, to compute memory and work at real size without weights.

One JSON file per model, in the words of diffusers' and transformers' own configuration files: the
models' published config.json files are the source. ``shared.json`` holds what several models share.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from configs.section import Tree

DIRECTORY = Path(__file__).resolve().parent
SHARED = "shared"


def published_names() -> list[str]:
    """Names of the models that are described here."""
    return sorted(path.stem for path in DIRECTORY.glob("*.json") if path.stem != SHARED)


def published(name: str) -> Tree:
    """One published model: family, pipeline, hub_id, height, width in pixels, and parts.

    ``parts`` maps the names of a diffusers pipeline ("transformer", "vae", "scheduler",
    "text_encoder", "tokenizer", ...) to {"class": "library.Class", "config": {...}}; tokenizers
    have no config. ``index``, where there is one, is what else model_index.json says. Raises
    ValueError for an unknown name.
    """
    if name not in published_names():
        raise ValueError(
            f"no published architecture {name!r}; there are {', '.join(published_names())}"
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
    """A model of ``published(name)["parts"]`` in eval mode without gradients.

    On "meta" it takes no memory; elsewhere its weights are random.
    """
    cls = _class(part)
    with made_in(dtype), torch.device(device):
        module = (
            cls.from_config(part["config"])
            if _library(part) == "diffusers"
            else cls(cls.config_class(**part["config"]))
        )
    return module.eval().requires_grad_(False)


@contextmanager
def made_in(dtype: torch.dtype) -> Iterator[None]:
    """Within the block torch's default type is ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def named_by(hub_id: str) -> tuple[str, Tree] | None:
    """(name, description) of the published model with this hub id.

    Of a ``variant``, another pipeline of the same architecture, the description is the model's with
    the variant's own family, pipeline and further parts. None: it is not described.
    """
    for name in published_names():
        model = published(name)
        for one in (model, *model.get("variants", ())):
            if one["hub_id"] == hub_id:
                parts = model["parts"] | one.get("parts", {})
                return name, {**model, **one, "parts": parts}
    return None


def write_configs(model: Tree, directory: str | Path) -> Path:
    """Write a pipeline directory of configuration files, without weights, for a ``Family`` to read.

    ``model`` is what ``published`` or ``named_by`` returns. Tokenizers are empty directories.
    Returns the directory.
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
            _class(part).config_class(**part["config"]).save_pretrained(target)
    (root / "model_index.json").write_text(json.dumps(index, indent=2))
    return root


def _library(part: Tree) -> str:
    return part["class"].split(".")[0]


def _class(part: Tree) -> Any:
    import importlib

    library, name = part["class"].split(".")
    return getattr(importlib.import_module(library), name)
