"""Atomic checkpoint directories of safetensors and JSON files.

A checkpoint is written under a temporary name beside its place, flushed to the disk and renamed, so
that it is either complete or absent.
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
    """A checkpoint cannot be written or read. The message is one line: which, why, what to do."""


def step_directory(root: str | Path, step: int) -> Path:
    """Return the path of a step's checkpoint: ``root/step_000010`` for step 10."""
    return Path(root) / f"step_{step:06d}"


def latest_checkpoint(root: str | Path) -> Path | None:
    """Return the complete checkpoint of the highest step under ``root``, or None.

    Unfinished checkpoints have other names and are ignored. Raises CheckpointError if the directory
    cannot be read.
    """
    complete = _complete(Path(root))
    return complete[-1] if complete else None


def find(rundir: RunDirectory, step: int | None) -> Path:
    """Return a run's checkpoint of ``step``, or its last one if ``step`` is None.

    Raises ConfigError if there is no such checkpoint, or if the directory cannot be read.
    """
    root = rundir.checkpoints
    try:
        complete = _complete(root)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    if step is None:
        path = complete[-1] if complete else None
    else:
        # a process that was killed while replacing a checkpoint leaves it as ``.replaced``
        path = next(
            (each for each in complete if step_of(each) == step), step_directory(root, step)
        )
    if path is None or not path.is_dir():
        steps = ", ".join(str(step_of(each)) for each in complete) or "none"
        missing = "no checkpoint yet" if step is None else f"no checkpoint {step}"
        raise ConfigError(f"{rundir.path}: {missing}; there are: {steps}")
    return path


def step_of(path: Path) -> int:
    """Return the step of a checkpoint: 10 for ``step_000010`` and ``step_000010.replaced``."""
    return int(path.name.removeprefix("step_").removesuffix(".replaced"))


def write(
    path: str | Path, files: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> None:
    """Write a checkpoint directory: one safetensors file per entry of ``files``, state as JSON.

    Keys of ``files`` are file names without suffix. If the process is killed or the disk is full,
    ``path`` has either nothing or everything, and other checkpoints are never harmed. Raises
    CheckpointError.
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
    """Return (files, state) as passed to ``write``, with tensors on the CPU.

    Raises CheckpointError if the checkpoint cannot be read or a file's sha256 does not match.
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
    """Remove all but the ``keep_last`` highest steps under ``root``, oldest first.

    Raises ValueError if ``keep_last`` is less than 1.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}: the last checkpoint must stay")
    for old in _complete(Path(root))[:-keep_last]:
        # renamed first: if the process is killed now, no partial checkpoint keeps a valid name
        discarded = atomic.unfinished(old)
        os.rename(old, discarded)
        shutil.rmtree(discarded)


def save_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write one safetensors file atomically. Raises OSError."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_bytes(path, _bytes_of(tensors, dict(metadata)))


def _bytes_of(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Serialize tensors, from any device, in the safetensors format."""
    on_cpu = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    return safetensors.torch.save(on_cpu, metadata)


def require_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str) -> None:
    """Raise CheckpointError unless names, shapes and dtypes agree; name the first difference."""
    for name in sorted({*found, *wanted}):
        a, b = found.get(name), wanted.get(name)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            described = [
                "absent" if t is None else f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
                for t in (a, b)
            ]
            raise CheckpointError(
                f"{what}: {name!r} is {described[0]} in the checkpoint but {described[1]} in this"
                " run: use the configuration it was made with"
            )


def _complete(root: Path) -> list[Path]:
    """Return the complete checkpoints, lowest step first.

    A ``.replaced`` directory counts only while its replacement is not in place. Raises
    CheckpointError if the directory cannot be read: a run without permission to read it would
    otherwise start from the beginning.
    """
    steps: dict[int, Path] = {}
    try:
        # not ``glob``, which silently skips directories without read permission. In reverse order,
        # "step_000001.replaced" comes before "step_000001", which then overrides it
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
    """Remove unfinished directories of earlier processes.

    Safe because only one process at a time writes checkpoints.
    """
    for path in root.glob(".step_*.unfinished-*"):
        shutil.rmtree(path, ignore_errors=True)
