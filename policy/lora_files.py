"""LoRA adapters as files: their names in checkpoints, and the diffusers LoRA format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from configs.training import Lora
from policy.experts import EXPERTS
from records import atomic

ENDING = ".safetensors"
FILE = f"pytorch_lora_weights{ENDING}"
FILES = dict(zip(EXPERTS, (FILE, f"pytorch_lora_weights_2{ENDING}"), strict=True))
"""File of each transformer; stock pipelines load one file per transformer."""
METADATA = "lora_adapter_metadata"
PREFIX = "transformer."
Rename = Callable[[Sequence[str]], dict[str, str]]
"""Function from the paths of a transformer's modules to their names in a LoRA file."""


def in_diffusers(modules: Sequence[str]) -> dict[str, str]:
    """Return the names of modules in a LoRA file of diffusers."""
    return {module: PREFIX + module for module in modules}


def adapter_file(name: str) -> str:
    """Return the name of an adapter's file in a checkpoint, without ``ENDING``."""
    return "adapter" if name == "current" else name


def by_file(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Group tensors by the file that stores them, the first transformer's file first.

    Keys within a file are relative to its transformer. Files without tensors are left out.
    """
    tensors_by_file: dict[str, dict[str, Tensor]] = {file: {} for file in FILES.values()}
    for key, value in state.items():
        expert, _, name = key.partition(".")
        file, name = (FILES[expert], name) if expert in FILES else (FILE, key)
        tensors_by_file[file][name] = value
    return {file: tensors for file, tensors in tensors_by_file.items() if tensors}


def save_diffusers_lora(
    path: str | Path, state: Mapping[str, Tensor], lora: Lora, rename: Rename = in_diffusers
) -> list[str]:
    """Write a LoRA directory for diffusers' ``pipe.load_lora_weights(path)``.

    B is multiplied by alpha / rank, and the file's alpha is its rank, so that the LoRA also has its
    full strength in programs that do not read alpha from the metadata, such as ComfyUI. ``rename``
    returns the names in the file of a transformer's modules; stock pipelines must know them.

    Each file is written under a temporary name and renamed, so that it is complete or absent.
    Returns the file names, the first transformer's first. Raises ValueError if ``state`` is empty.
    """
    if not state:
        raise ValueError("an adapter without weights cannot be saved")
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    files = by_file(state)
    for file, tensors in files.items():
        _save(directory / file, tensors, lora, rename)
    return list(files)


def _save(file: Path, state: Mapping[str, Tensor], lora: Lora, rename: Rename) -> None:
    from safetensors.torch import save

    modules = sorted({key.rsplit(".lora_", 1)[0] for key in state})
    config = {
        "r": lora.rank,
        "lora_alpha": lora.rank,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
    }
    metadata = {
        "format": "pt",
        METADATA: json.dumps(
            {PREFIX + key: value for key, value in config.items()}, sort_keys=True
        ),
    }
    tensors, names = {}, rename(modules)
    for key, value in state.items():
        module, part = key.rsplit(".lora_", 1)
        scale = lora.alpha / lora.rank if part == "B.weight" else 1.0
        tensors[f"{names[module]}.lora_{part}"] = (value.float() * scale).contiguous()
    with atomic.replace_file(file) as beside:
        # save_file does not raise OSError if it is not permitted to write
        beside.write_bytes(save(tensors, metadata=metadata))
