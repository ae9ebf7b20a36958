"""LoRA adapters as files: their names in checkpoints, and the diffusers LoRA format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
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


def save_diffusers_lora(path: str | Path, state: Mapping[str, Tensor], lora: Lora) -> list[str]:
    """Write a LoRA directory for diffusers' ``pipe.load_lora_weights(path)``.

    B is multiplied by alpha / rank, and the file's alpha is its rank, so that the LoRA also has its
    full strength in programs that do not read alpha from the metadata, such as ComfyUI.

    Each file is written under a temporary name and renamed, so that it is complete or absent.
    Returns the file names, the first transformer's first. Raises ValueError if ``state`` is empty.
    """
    if not state:
        raise ValueError("an adapter without weights cannot be saved")
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    files = by_file(state)
    for file, tensors in files.items():
        _save(directory / file, tensors, lora)
    return list(files)


def _save(file: Path, state: Mapping[str, Tensor], lora: Lora) -> None:
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
    tensors = {}
    for key, value in state.items():
        scale = lora.alpha / lora.rank if key.endswith(".lora_B.weight") else 1.0
        tensors[PREFIX + key] = (value.float() * scale).contiguous()
    with atomic.replace_file(file) as beside:
        # save_file does not raise OSError if it is not permitted to write
        beside.write_bytes(save(tensors, metadata=metadata))


def load_diffusers_lora(
    path: str | Path, name: str = FILE
) -> tuple[dict[str, Tensor], float | None]:
    """Return (LoRA tensors of one transformer, alpha or None) of a diffusers LoRA.

    ``path`` is a file, or a directory with a file ``name``. Raises FileNotFoundError if there is no
    such file, and ValueError if it cannot be read or has no weights of a transformer.
    """
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    file = file if file.is_file() else file / name
    if not file.is_file():
        raise FileNotFoundError(
            f"lora.init_from: {name} not found in {str(path)!r}: give the directory of a diffusers"
            " LoRA"
        )
    try:
        with safe_open(file, framework="pt") as opened:
            alpha = _alpha((opened.metadata() or {}).get(METADATA, "{}"))
            keys = [key for key in list(opened.keys()) if key.startswith(PREFIX)]
            state = {key.removeprefix(PREFIX): opened.get_tensor(key) for key in keys}
    # RecursionError: too deeply nested lists in the metadata
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(
            f"lora.init_from: {str(file)!r} is not a readable safetensors file: {error}"
        ) from error
    if not state:
        raise ValueError(f"lora.init_from: {str(file)!r} has no weights that start with {PREFIX!r}")
    return state, alpha


def _alpha(metadata: str) -> float | None:
    """Return the alpha in a file's metadata, or None if it has none.

    Raises ValueError if the metadata is invalid, and RecursionError if it is nested too deeply.
    """
    values: object = json.loads(metadata)
    if not isinstance(values, dict):
        raise ValueError(f"its {METADATA} is not a JSON object")
    alpha = values.get(PREFIX + "lora_alpha")
    if alpha is not None and not (type(alpha) in (int, float) and 0 < alpha < math.inf):
        raise ValueError(f"its lora_alpha is {str(alpha)[:80]!r}, not a number above 0")
    return alpha


def start_from(state: Mapping[str, Tensor], lora: Lora) -> None:
    """Overwrite the initial ``state`` so that every product B A equals that of ``lora.init_from``.

    A LoRA of smaller rank fills the first rows of A and the first columns of B. A different
    alpha / rank is folded into B. Raises FileNotFoundError or ValueError if it is missing or does
    not fit.
    """
    files = by_file(state)
    if len(files) > 1 and Path(str(lora.init_from)).is_file():
        raise ValueError(
            f"lora.init_from: {lora.init_from!r} is one file, but the model has two transformers:"
            f" give a directory with {' and '.join(files)}"
        )
    for file, tensors in files.items():
        _start_from(tensors, lora, file)


def _start_from(state: Mapping[str, Tensor], lora: Lora, file: str) -> None:
    initial, alpha = load_diffusers_lora(str(lora.init_from), file)
    unknown = sorted(initial.keys() - state.keys())
    if unknown:
        raise ValueError(
            f"lora.init_from: {lora.init_from!r} has {unknown[0]!r}, which is not in lora.targets:"
            " add it there"
        )
    modules = sorted({key.rsplit(".lora_", 1)[0] for key in state})
    provided = {key.rsplit(".lora_", 1)[0] for key in initial}
    if missing := [module for module in modules if module not in provided]:
        raise ValueError(
            f"lora.init_from: {lora.init_from!r} has nothing for {len(missing)} of {len(modules)}"
            f" adapted modules, such as {missing[0]!r}: restrict lora.targets to those that it has"
        )
    for key, value in initial.items():
        module, part = key.rsplit(".lora_", 1)
        if {f"{module}.lora_A.weight", f"{module}.lora_B.weight"} - initial.keys():
            raise ValueError(
                f"lora.init_from: {lora.init_from!r} has only {key!r} of its pair of matrices"
            )
        if part != "A.weight":
            continue
        down, up = value.float(), initial[f"{module}.lora_B.weight"].float()
        rank, a, b = len(down), state[key], state[f"{module}.lora_B.weight"]
        if (
            rank > lora.rank
            or down.shape[1:] != a.shape[1:]
            or up.shape != (b.shape[0], rank, *b.shape[2:])
        ):
            own = f"{up.shape[0]}x{down.shape[1]} of rank {rank}"
            expected = f"{b.shape[0]}x{a.shape[1]} of rank {lora.rank}"
            raise ValueError(
                f"lora.init_from: {module} is {own}, but {expected} is expected: raise lora.rank"
                " or use another LoRA"
            )
        a[:rank] = down
        b[:, :rank] = up * (((alpha or rank) / rank) / (lora.alpha / lora.rank))
