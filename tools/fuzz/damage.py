"""Damage to one file of a directory: to its bytes, JSON values, tensors or file type."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tools.fuzz.inputs import json_values, spliced

REMOVED = "\0removed"
"""Stands in for a JSON value and means that the key or the list entry is removed."""
NUMBERS = (0, 1, -1, 3, 2**20, 2**31, -(2**63) - 1, 10**400, 0.5, 1e308, float("nan"), float("inf"))
OTHERS = (None, True, False, "", "x", "\0", "../..", "x" * 5000, [], {}, [[]], [None], {"a": {}})
values = st.sampled_from([REMOVED, *NUMBERS, *OTHERS]) | json_values
KINDS = ("gone", "empty", "directory", "loop", "locked", "dangling")
TENSORS = ("dropped", "renamed", "longer", "flat", "scalar", "int8", "double", "half", "nan", "inf")
NOBODY = 65534


@dataclass(frozen=True)
class Change:
    """Damage to one file: ``how`` is the kind of damage, ``what`` its parameters."""

    file: str
    how: str
    what: Any = None

    def make(self, folder: Path) -> None:
        """Damage the file in ``folder``; other files are unchanged."""
        path = folder / self.file
        data = path.read_bytes()
        path.unlink()  # it may be a symlink to the original, which must not be changed
        if self.how in KINDS:
            _another_kind(path, self.how)
        elif self.how == "tensor":
            _other_tensor(path, data, *self.what)
        else:
            path.write_bytes(_changed(data, self.how, self.what))


def changes(folder: Path) -> st.SearchStrategy[Change]:
    """Strategy for damage to one of the files in ``folder``."""
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    return st.sampled_from(names).flatmap(lambda name: _of_file(folder, name))


def _of_file(folder: Path, name: str) -> st.SearchStrategy[Change]:
    path = folder / name
    size = path.stat().st_size
    edit = st.tuples(st.integers(0, size), st.integers(0, 40), st.binary(max_size=12))
    kinds = [
        st.tuples(st.sampled_from(KINDS), st.none()),
        st.tuples(st.just("splice"), st.lists(edit, min_size=1, max_size=4)),
        st.tuples(st.just("cut"), st.integers(0, max(0, size - 1))),
        st.tuples(st.just("whole"), st.binary(max_size=40) | json_values.map(_json)),
    ]
    if path.suffix in (".json", ".jsonl"):
        place = st.sampled_from(_places(path))
        kinds += [st.tuples(st.just("value"), st.tuples(place, values))] * 4
    if path.suffix == ".safetensors":
        header = st.tuples(st.integers(0, min(size - 1, 400)), st.integers(0, 255))
        kinds += [st.tuples(st.just("byte"), header)]
    if names := _tensors(path):
        tensor = st.tuples(st.sampled_from(names), st.sampled_from(TENSORS))
        kinds += [st.tuples(st.just("tensor"), tensor)] * 3
    return st.one_of(kinds).map(lambda way: Change(name, *way))


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


# ---- bytes and JSON


def _changed(data: bytes, how: str, what: Any) -> bytes:
    if how == "whole":
        return what
    if how == "cut":
        return data[:what]
    if how == "byte":
        place, byte = what
        return data[:place] + bytes([byte]) + data[place + 1 :]
    if how == "splice":
        return spliced(data, what)
    (row, *keys), value = what
    rows = data.decode().splitlines() if row is not None else [data.decode()]
    root = [json.loads(rows[row or 0])]
    _put(root, [0, *keys], value)
    rows[row or 0] = json.dumps(root[0]) if root else ""
    return "\n".join(rows).encode()


def _put(root: Any, keys: Sequence[Any], value: object) -> None:
    for key in keys[:-1]:
        root = root[key]
    if value == REMOVED:
        del root[keys[-1]]
    else:
        root[keys[-1]] = value


def _places(path: Path) -> list[tuple[Any, ...]]:
    """Return the path (line or None, key, ...) of every value in a JSON file.

    The line is an index for .jsonl files and None for others. Of a list, only the first two entries
    are included.
    """
    lines = (
        path.read_text(encoding="utf-8").splitlines()
        if path.suffix == ".jsonl"
        else [path.read_text(encoding="utf-8")]
    )
    places: list[tuple[Any, ...]] = []

    def walk(value: Any, prefix: tuple[Any, ...]) -> None:
        places.append(prefix)
        inner = value.items() if isinstance(value, dict) else enumerate(value[:2])
        for key, item in inner:
            if isinstance(item, dict | list):
                walk(item, (*prefix, key))
            else:
                places.append((*prefix, key))

    for number, line in enumerate(lines):
        walk(json.loads(line), (number if path.suffix == ".jsonl" else None,))
    return places


# ---- tensors


def _tensors(path: Path) -> list[str]:
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="np") as opened:
            return sorted(opened.keys())
    return sorted(_loaded(path.read_bytes())) if path.suffix == ".pt" else []


def _loaded(data: bytes) -> dict[str, Any]:
    import io

    import torch

    return torch.load(io.BytesIO(data), weights_only=True)


def _other_tensor(path: Path, data: bytes, name: str, how: str) -> None:
    import torch
    from safetensors.torch import load, save_file

    state = load(data) if path.suffix == ".safetensors" else _loaded(data)
    tensor = state.pop(name)
    if how == "renamed":
        state[f"{name}_"] = tensor
    elif how in ("nan", "inf"):
        state[name] = torch.full_like(tensor.float(), float(how))
    elif how != "dropped":
        state[name] = {
            "longer": lambda: torch.cat([tensor.reshape(-1), tensor.reshape(-1)[:1]]),
            "flat": lambda: tensor.reshape(-1, 1),
            "scalar": lambda: torch.zeros((), dtype=tensor.dtype),
            "int8": lambda: tensor.to(torch.int8),
            "double": lambda: tensor.double(),
            "half": lambda: tensor.half(),
        }[how]()
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)


# ---- file type


def _another_kind(path: Path, kind: str) -> None:
    """Create something other than a useful file at ``path``, which must not exist."""
    if kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind != "gone":
        path.write_bytes(b"")
        if kind == "locked":
            path.chmod(0)


@contextlib.contextmanager
def as_unprivileged_user() -> Iterator[None]:
    """Run the block as an unprivileged user.

    Root ignores file permissions, so a locked file has an effect only for another user. Without
    root this does nothing.
    """
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def linked(source: Path, target: Path) -> Path:
    """Replace ``target`` by a directory of symlinks to the files of ``source``."""
    shutil.rmtree(target, ignore_errors=True)
    for path in sorted(source.rglob("*")):
        there = target / path.relative_to(source)
        if path.is_file():
            there.parent.mkdir(parents=True, exist_ok=True)
            there.symlink_to(path.resolve())
    return target
