"""Training state on disk, without pickle.

Model and optimizer are stored as safetensors, counters as JSON. Writes are atomic.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to ``path``; on success the file there replaces ``path``."""
    partial = path.with_suffix(".partial")
    yield partial
    os.replace(partial, path)


def save_state(
    path: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    counters: dict[str, Any],
) -> None:
    """Write ``path``.safetensors and ``path``.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # cloned because safetensors rejects shared memory: a text encoder has a matrix under two names
    tensors = {
        f"model.{name}": value.contiguous().clone() for name, value in model.state_dict().items()
    }
    for index, slots in (optimizer.state_dict()["state"] if optimizer else {}).items():
        for slot, value in slots.items():
            tensors[f"optimizer.{index}.{slot}"] = torch.as_tensor(value).contiguous().clone()
    with _replacing(path.with_suffix(".safetensors")) as partial:
        save_file(tensors, partial)
    with _replacing(path.with_suffix(".json")) as partial:
        partial.write_text(json.dumps(counters))


def load_or_create(cache: Path | None, make: Callable[[], Tensors]) -> Tensors:
    """Return the tensors of ``make()``.

    With ``cache``, they are stored in that file and loaded from it later.
    """
    if cache and cache.exists():
        return load_file(cache)
    parts = make()
    if cache:
        with _replacing(cache) as partial:
            save_file(parts, partial)
    return parts


def load_state(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Restore the state that ``save_state`` wrote, and return its counters.

    Returns {} if there is no saved state.
    """
    if not path.with_suffix(".json").exists():
        return {}
    tensors = load_file(path.with_suffix(".safetensors"))
    model.load_state_dict(
        {name[6:]: value for name, value in tensors.items() if name.startswith("model.")}
    )
    if optimizer is None:
        return json.loads(path.with_suffix(".json").read_text())
    slots: dict[int, Tensors] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, slot = name.split(".")
            slots.setdefault(int(index), {})[slot] = value
    optimizer.load_state_dict(
        {"state": slots, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    return json.loads(path.with_suffix(".json").read_text())
