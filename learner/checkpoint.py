"""Checkpoint directories, written atomically, with safetensors and JSON files only.

They are written under another name, flushed to the disk and renamed, so that a checkpoint is either
complete or absent.
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
from configs.paths import is_dir, is_file
from configs.section import Tree
from policy.lora_files import ENDING
from records import atomic
from records.rundir import RunDirectory
from records.storage import read_bytes, retried

STATE = "state.json"
FORMAT = 1
STEP = re.compile(r"step_(\d{6,})(\.replaced)?")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read. One line: which, why, and what to do."""


def step_directory(root: str | Path, step: int) -> Path:
    """Return ``root/step_000010`` for step 10."""
    return Path(root) / f"step_{step:06d}"


def latest_checkpoint(root: str | Path) -> Path | None:
    """Return the complete checkpoint with the highest step under ``root``, or None.

    Raises CheckpointError if the directory cannot be read.
    """
    whole = _whole(Path(root))
    return whole[-1] if whole else None


def incomplete_checkpoints(root: str | Path) -> list[Path]:
    """Return the directories above the newest complete checkpoint that lack files.

    Raises CheckpointError if a directory cannot be read.
    """
    newest = latest_checkpoint(root)
    lowest = step_of(newest) + 1 if newest else 0
    found = [path for path in Path(root).glob("step_*") if STEP.fullmatch(path.name)]
    return sorted(path for path in found if step_of(path) >= lowest)


def find(rundir: RunDirectory, step: int | None) -> Path:
    """Return the checkpoint of ``step``, or the last one, of a run.

    Raises ConfigError if there is none, or if the directory cannot be read.
    """
    root = rundir.checkpoints
    try:
        whole = _whole(root)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    if step is None:
        path = whole[-1] if whole else None
    else:
        # not by name: after a kill it may have the suffix ``.replaced``
        path = next(
            (other for other in whole if step_of(other) == step), step_directory(root, step)
        )
    if path is None or not is_dir(path):
        there = ", ".join(str(step_of(other)) for other in whole) or "none"
        requested = "no checkpoint yet" if step is None else f"no checkpoint {step}"
        raise ConfigError(f"{rundir.path}: {requested}; available: {there}")
    return path


def step_of(path: Path) -> int:
    """Return 10 for ``step_000010`` and for ``step_000010.replaced``."""
    return int(path.name.removeprefix("step_").removesuffix(".replaced"))


def write(
    path: str | Path, files: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> None:
    """Write the checkpoint directory ``path`` atomically.

    It has a safetensors file for each entry of ``files`` (named without suffix), and ``state`` as
    JSON. After a kill or on a full disk ``path`` is either complete or absent, and other
    checkpoints are unharmed. Raises CheckpointError.
    """
    path = Path(path)
    try:
        _write(path, files, state)
    except OSError as error:
        try:
            last = latest_checkpoint(path.parent)
        except CheckpointError:
            last = None
        kept = (
            f"the last complete checkpoint is {last.name}"
            if last
            else "there is no earlier checkpoint"
        )
        raise CheckpointError(
            f"checkpoint {str(path)!r} could not be written: {error.strerror or error}: {kept};"
            " free disk space or grant write access, then continue with --resume"
        ) from error


@retried
def _write(path: Path, files: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    _clear_unfinished(path.parent)
    with atomic.replace_directory(path) as beside:
        digests = {}
        for name, tensors in files.items():
            data = _bytes_of(tensors)
            (beside / f"{name}{ENDING}").write_bytes(data)
            digests[f"{name}{ENDING}"] = hashlib.sha256(data).hexdigest()
        body = {"format": FORMAT, "files": digests, "state": dict(state)}
        (beside / STATE).write_text(json.dumps(body, indent=1), encoding="utf-8")


def read(path: str | Path) -> tuple[dict[str, dict[str, Tensor]], Tree]:
    """Read (files, state) as passed to ``write``, with tensors on the CPU.

    Verifies the sha256 of every file. Raises CheckpointError.
    """
    path = Path(path)
    try:
        body = json.loads(read_bytes(path / STATE))
        if body["format"] != FORMAT:
            raise CheckpointError(
                f"checkpoint {str(path)!r} has format {body['format']}, this version reads"
                f" {FORMAT}: use the version that wrote it"
            )
        files = {}
        for name, digest in body["files"].items():
            data = read_bytes(path / name)
            if hashlib.sha256(data).hexdigest() != digest:
                raise CheckpointError(
                    f"checkpoint {str(path)!r}: {name} is damaged: resume from an earlier"
                    " checkpoint"
                )
            files[name.removesuffix(ENDING)] = safetensors.torch.load(data)
        if not isinstance(body["state"], dict):
            raise TypeError("its state is not an object")
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


@retried
def prune(root: str | Path, keep_last: int) -> None:
    """Remove all but the ``keep_last`` highest steps under ``root``, oldest first.

    Raises ValueError if ``keep_last`` is below 1.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}: at least the last checkpoint must be kept")
    for old in _whole(Path(root))[:-keep_last]:
        # renamed first, so that a kill cannot leave an incomplete directory under this name
        doomed = atomic.temporary_path(old)
        os.rename(old, doomed)
        # what cannot be removed now is removed by the next ``write``; it is no checkpoint any more.
        # On rclone's mounts rmtree fails if a directory has got another inode number meanwhile
        shutil.rmtree(doomed, ignore_errors=True)


def save_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write one safetensors file atomically. Raises OSError."""
    path = Path(path)
    path.parent.mkdir(exist_ok=True)
    atomic.write_bytes(path, _bytes_of(tensors, dict(metadata)))


def _bytes_of(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    on_host = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    return safetensors.torch.save(on_host, metadata)


def require_same(found: Mapping[str, Tensor], requested: Mapping[str, Tensor], what: str) -> None:
    """Raise CheckpointError for the first tensor whose name, shape or dtype differs."""
    for name in sorted({*found, *requested}):
        a, b = found.get(name), requested.get(name)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            text = [
                "absent" if t is None else f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
                for t in (a, b)
            ]
            raise CheckpointError(
                f"{what}: {name!r} is {text[0]} in the checkpoint but {text[1]} in this run: use"
                " the configuration with which it was written"
            )


def _whole(root: Path) -> list[Path]:
    """Return the complete checkpoints, lowest step first.

    A replaced one counts only until its replacement is in place. Raises CheckpointError if the
    directory cannot be read, as a run that saw no checkpoints would start again from the beginning.
    """
    try:
        steps = _steps(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"checkpoints: {error.filename or root} cannot be read ({error.strerror or error})"
        ) from None
    return [steps[step] for step in sorted(steps)]


@retried
def _steps(root: Path) -> dict[int, Path]:
    """Return the complete checkpoints by step. Raises OSError."""
    steps: dict[int, Path] = {}
    # not ``glob``, which skips what it may not read. In reverse order, so that "step_000001"
    # overwrites the entry of "step_000001.replaced"
    for name in sorted(os.listdir(root), reverse=True):
        match = STEP.fullmatch(name)
        if match and _is_whole(root / name):
            steps[int(match[1])] = root / name
    return steps


def _is_whole(checkpoint: Path) -> bool:
    """Return True if the state and all files that it names are there, damaged or not.

    A mount of an object store renames a directory file by file, so that some files may be missing
    after the loss of its machine. Raises OSError.
    """
    if not is_file(checkpoint / STATE):
        return False
    try:
        names = list(json.loads((checkpoint / STATE).read_bytes())["files"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return True  # reading it will say what is damaged
    present = set(os.listdir(checkpoint))
    return all(name in present for name in names)


def _clear_unfinished(root: Path) -> None:
    """Remove unfinished directories of earlier processes; only one process writes checkpoints."""
    for path in root.glob(".step_*.unfinished-*"):
        shutil.rmtree(path, ignore_errors=True)
