"""Checkpoint directories that are whole or absent: written beside, flushed to the disk, renamed.
Safetensors and JSON only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from configs.load import ConfigError
from configs.section import Tree
from policy.lora_files import ENDING
from records import atomic
from records.rundir import RunDirectory

STATE = "state.json"
FORMAT = 1
STEP = re.compile(r"step_(\d{6,})(\.replaced)?")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read. One line: which, why, and what to do."""


def step_directory(root: str | Path, step: int) -> Path:
    """``root/step_000010`` for step 10."""
    return Path(root) / f"step_{step:06d}"


def latest_checkpoint(root: str | Path) -> Path | None:
    """The whole checkpoint of the highest step under ``root``, or None. What was left unfinished
    has another name. Raises CheckpointError where nobody can know.
    """
    found = _whole(Path(root))
    return found[-1] if found else None


def find(rundir: RunDirectory, step: int | None) -> Path:
    """The checkpoint of ``step``, or the last one, of a run. Raises ConfigError: there is none, or
    nobody can know.
    """
    root = rundir.checkpoints
    try:
        whole = _whole(root)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    if step is None:
        path = whole[-1] if whole else None
    else:
        # also one that a kill left under the name ``.replaced``
        path = next(
            (found for found in whole if step_of(found) == step), step_directory(root, step)
        )
    if path is None or not path.is_dir():
        there = ", ".join(str(step_of(found)) for found in whole) or "none"
        wanted = "no checkpoint yet" if step is None else f"no checkpoint {step}"
        raise ConfigError(f"{rundir.path}: {wanted}; there are: {there}")
    return path


def step_of(path: Path) -> int:
    """10 of ``step_000010``, and of ``step_000010.replaced``."""
    return int(path.name.removeprefix("step_").removesuffix(".replaced"))


def write(
    path: str | Path, files: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> None:
    """Write the directory ``path``: a safetensors file per entry of ``files`` (without ending), and
    ``state`` as JSON.

    A kill or a full disk at any instant leaves either nothing or all of it at ``path``, and never
    harms another checkpoint. Raises CheckpointError.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear_unfinished(path.parent)
        with atomic.replacing_directory(path) as beside:
            digests = {}
            for name, tensors in files.items():
                data = _bytes_of(tensors)
                (beside / f"{name}{ENDING}").write_bytes(data)
                digests[f"{name}{ENDING}"] = hashlib.sha256(data).hexdigest()
            body = {"format": FORMAT, "files": digests, "state": dict(state)}
            (beside / STATE).write_text(json.dumps(body, indent=1), encoding="utf-8")
    except OSError as error:
        try:
            last = latest_checkpoint(path.parent)
        except CheckpointError:
            last = None
        kept = (
            f"the last whole checkpoint is {last.name}"
            if last
            else "there is no earlier checkpoint"
        )
        raise CheckpointError(
            f"checkpoint {str(path)!r} could not be written: {error.strerror or error}: {kept};"
            " make room or rights, then --resume"
        ) from error


def read(path: str | Path) -> tuple[dict[str, dict[str, Tensor]], Tree]:
    """(files, state) as given to ``write``, tensors on the CPU, every sha256 compared.

    Raises CheckpointError.
    """
    path = Path(path)
    try:
        body = json.loads((path / STATE).read_bytes())
        if body["format"] != FORMAT:
            raise CheckpointError(
                f"checkpoint {str(path)!r} has format {body['format']}, this version reads"
                f" {FORMAT}: use the version that wrote it"
            )
        files = {}
        for name, digest in body["files"].items():
            data = (path / name).read_bytes()
            if hashlib.sha256(data).hexdigest() != digest:
                raise CheckpointError(
                    f"checkpoint {str(path)!r}: {name} is not what was written: resume from an"
                    " earlier checkpoint"
                )
            files[name.removesuffix(ENDING)] = safetensors.torch.load(data)
        if not isinstance(body["state"], dict):
            raise TypeError("its state is no object")
        return files, body["state"]
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        safetensors.SafetensorError,
    ) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"checkpoint {str(path)!r} cannot be read: {reason}: give a step directory of"
            " checkpoints/"
        ) from error


def prune(root: str | Path, keep_last: int) -> None:
    """Remove all but the ``keep_last`` highest steps under ``root``, oldest first. Needs
    ``keep_last`` >= 1.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}: the last checkpoint must stay")
    for old in _whole(Path(root))[:-keep_last]:
        # renamed first: a kill must not leave part of one under a checkpoint's name
        doomed = atomic.unfinished(old)
        os.rename(old, doomed)
        shutil.rmtree(doomed)


def save_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """One safetensors file, whole or absent. Raises OSError."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_bytes(path, _bytes_of(tensors, dict(metadata)))


def _bytes_of(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    there = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    return safetensors.torch.save(there, metadata)


def require_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str) -> None:
    """Raise CheckpointError, naming the first, unless names, shapes and dtypes agree."""
    for name in sorted({*found, *wanted}):
        a, b = found.get(name), wanted.get(name)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            said = [
                "absent" if t is None else f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
                for t in (a, b)
            ]
            raise CheckpointError(
                f"{what}: {name!r} is {said[0]} in the checkpoint but {said[1]} in this run: use"
                " the configuration it was made with"
            )


def _whole(root: Path) -> list[Path]:
    """Whole checkpoints, lowest step first. A replaced one counts only while its replacement is not
    in place. Raises CheckpointError where they cannot be looked at: a run without the right to
    would go back to its beginning.
    """
    steps: dict[int, Path] = {}
    try:
        # not ``glob``, which passes over what it has no right to. Backwards: "step_000001.replaced"
        # before "step_000001", which then takes its place
        for name in sorted(os.listdir(root), reverse=True):
            match = STEP.fullmatch(name)
            if match and (root / name / STATE).is_file():
                steps[int(match[1])] = root / name
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"checkpoints: {error.filename or root} cannot be read ({error.strerror or error})"
        ) from None
    return [steps[step] for step in sorted(steps)]


def _clear_unfinished(root: Path) -> None:
    """Remove what earlier processes left unfinished; one process at a time writes checkpoints."""
    for path in root.glob(".step_*.unfinished-*"):
        shutil.rmtree(path, ignore_errors=True)
