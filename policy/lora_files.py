"""Adapters as files: what checkpoints call them, and the LoRA of stock diffusers."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from configs.training import Lora
from records import atomic

ENDING = ".safetensors"
FILE = f"pytorch_lora_weights{ENDING}"
METADATA = "lora_adapter_metadata"
PREFIX = "transformer."


def adapter_file(name: str) -> str:
    """What a checkpoint calls the file of an adapter, without ``ENDING``."""
    return "adapter" if name == "current" else name


def save_diffusers_lora(path: str | Path, state: dict[str, Tensor], lora: Lora) -> Path:
    """Write the directory that stock ``pipe.load_lora_weights(path)`` loads, with rank and alpha.

    The file is written under another name and renamed, so that it is whole or absent. Returns its
    path.
    """
    from safetensors.torch import save

    modules = sorted({key.rsplit(".lora_", 1)[0] for key in state})
    if not modules:
        raise ValueError("an adapter without weights cannot be saved")
    config = {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
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
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {PREFIX + key: value.float().contiguous() for key, value in state.items()}
    with atomic.replacing(directory / FILE) as beside:
        # save_file would not raise OSError where it may not write
        beside.write_bytes(save(tensors, metadata=metadata))
    return directory / FILE


def load_diffusers_lora(path: str | Path) -> tuple[dict[str, Tensor], float | None]:
    """(the transformer's LoRA tensors, alpha or None) of a diffusers LoRA directory."""
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    file = file if file.is_file() else file / FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"lora.init_from: there is no {FILE} in {str(path)!r}: give the directory of a"
            " diffusers LoRA"
        )
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = json.loads((opened.metadata() or {}).get(METADATA, "{}"))
            ours = [key for key in list(opened.keys()) if key.startswith(PREFIX)]
            state = {key.removeprefix(PREFIX): opened.get_tensor(key) for key in ours}
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(
            f"lora.init_from: {str(file)!r} is not a readable safetensors file: {error}"
        ) from error
    if not state:
        raise ValueError(f"lora.init_from: {str(file)!r} has no weights that start with {PREFIX!r}")
    return state, metadata.get(PREFIX + "lora_alpha")


def start_from(state: dict[str, Tensor], lora: Lora) -> None:
    """Overwrite the initial ``state`` so that every product B A is that of ``lora.init_from``.

    A smaller rank fills the first rows of A and columns of B; a different alpha / rank is folded
    into B.
    """
    given, alpha = load_diffusers_lora(str(lora.init_from))
    unknown = sorted(given.keys() - state.keys())
    if unknown:
        raise ValueError(
            f"lora.init_from: {lora.init_from!r} has {unknown[0]!r}, which is in no module of"
            " lora.targets: add it there"
        )
    modules = sorted({key.rsplit(".lora_", 1)[0] for key in state})
    there = {key.rsplit(".lora_", 1)[0] for key in given}
    if missing := [module for module in modules if module not in there]:
        raise ValueError(
            f"lora.init_from: {lora.init_from!r} has nothing for {len(missing)} of"
            f" {len(modules)} adapted modules, such as {missing[0]!r}: name in lora.targets those"
            " that it has"
        )
    for key, value in given.items():
        module, part = key.rsplit(".lora_", 1)
        if {f"{module}.lora_A.weight", f"{module}.lora_B.weight"} - given.keys():
            raise ValueError(
                f"lora.init_from: {lora.init_from!r} has only {key!r} of its pair of matrices"
            )
        if part != "A.weight":
            continue
        down, up = value.float(), given[f"{module}.lora_B.weight"].float()
        rank, a, b = len(down), state[key], state[f"{module}.lora_B.weight"]
        if (
            rank > lora.rank
            or down.shape[1:] != a.shape[1:]
            or up.shape != (b.shape[0], rank, *b.shape[2:])
        ):
            found = f"{up.shape[0]}x{down.shape[1]} of rank {rank}"
            wanted = f"{b.shape[0]}x{a.shape[1]} of rank {lora.rank}"
            raise ValueError(
                f"lora.init_from: {module} is {found}, here it is {wanted}: raise lora.rank or use"
                " another LoRA"
            )
        a[:rank] = down
        b[:, :rank] = up * (((alpha or rank) / rank) / (lora.alpha / lora.rank))
