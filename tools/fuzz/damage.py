"""One file of a directory made wrong: its bytes, a value of its JSON, a tensor, or what it is."""

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
"""In place of a value of a JSON file: the key, or the entry, is not there."""
NUMBERS = (0, 1, -1, 3, 2**20, 2**31, -(2**63) - 1, 10**400, 0.5, 1e308, float("nan"), float("inf"))
OTHERS = (None, True, False, "", "x", "\0", "../..", "x" * 5000, [], {}, [[]], [None], {"a": {}})
values = st.sampled_from([REMOVED, *NUMBERS, *OTHERS]) | json_values
KINDS = ("gone", "empty", "directory", "loop", "locked", "dangling")
TENSORS = ("dropped", "renamed", "longer", "flat", "scalar", "int8", "double", "half", "nan", "inf")
NOBODY = 65534


@dataclass(frozen=True)
class Change:
    """``how`` one file is made wrong, and ``what`` takes the place of what."""

    file: str
    how: str
    what: Any = None

    def make(self, folder: Path) -> None:
        """Make it in ``folder``, whose other files stay as they are."""
        path = folder / self.file
        data = path.read_bytes()
        path.unlink()  # it may be a link to the file that was copied
        if self.how in KINDS:
            _another_kind(path, self.how)
        elif self.how == "tensor":
            _other_tensor(path, data, *self.what)
        else:
            path.write_bytes(_changed(data, self.how, self.what))


def changes(folder: Path) -> st.SearchStrategy[Change]:
    """One of the files in ``folder`` made wrong."""
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    return st.sampled_from(names).flatmap(lambda name: _of_file(folder, name))


def _of_file(folder: Path, name: str) -> st.SearchStrategy[Change]:
    path = folder / name
    size = path.stat().st_size
    edit = st.tuples(st.integers(0, size), st.integers(0, 40), st.binary(max_size=12))
    ways = [
        st.tuples(st.sampled_from(KINDS), st.none()),
        st.tuples(st.just("splice"), st.lists(edit, min_size=1, max_size=4)),
        st.tuples(st.just("cut"), st.integers(0, max(0, size - 1))),
        st.tuples(st.just("whole"), st.binary(max_size=40) | json_values.map(_json)),
    ]
    if path.suffix in (".json", ".jsonl"):
        one = st.sampled_from(_places(path))
        ways += [st.tuples(st.just("value"), st.tuples(one, values))] * 4
    if path.suffix == ".safetensors":
        header = st.tuples(st.integers(0, min(size - 1, 400)), st.integers(0, 255))
        ways += [st.tuples(st.just("byte"), header)]
    if names := _tensors(path):
        some = st.tuples(st.sampled_from(names), st.sampled_from(TENSORS))
        ways += [st.tuples(st.just("tensor"), some)] * 3
    return st.one_of(ways).map(lambda way: Change(name, *way))


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
    """(line of a .jsonl or None, key ...) of every value, of long lists the first two."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    found: list[tuple[Any, ...]] = []

    def walk(value: Any, at: tuple[Any, ...]) -> None:
        found.append(at)
        inner = value.items() if isinstance(value, dict) else enumerate(value[:2])
        for key, each in inner:
            if isinstance(each, dict | list):
                walk(each, (*at, key))
            else:
                found.append((*at, key))

    for number, line in enumerate(lines):
        walk(json.loads(line), (number if path.suffix == ".jsonl" else None,))
    return found


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


# ---- what a path is


def _another_kind(path: Path, kind: str) -> None:
    """``path``, where nothing is, becomes something else than a file, or one that is of no use."""
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
def nobody() -> Iterator[None]:
    """As a user whom rights keep out: root is kept out of nothing."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def linked(source: Path, target: Path) -> Path:
    """A directory of links to the files of ``source``, in place of the one of the input before."""
    shutil.rmtree(target, ignore_errors=True)
    for path in sorted(source.rglob("*")):
        there = target / path.relative_to(source)
        if path.is_file():
            there.parent.mkdir(parents=True, exist_ok=True)
            there.symlink_to(path.resolve())
    return target
