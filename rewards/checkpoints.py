"""Loading of scorer weights from a file, a directory or a hub id, without running their code."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from configs.paths import is_dir, is_file
from records import weights
from records.errors import error_summary
from rewards.base import ScorerSetupError

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>[^:]+))?")
FILE_ENDINGS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".txt")
"""Endings by which a name is taken for a file rather than a repository."""
ROOT = Path(__file__).parent.parent
M = TypeVar("M", bound=torch.nn.Module)
ADVICE = "docs/rewards.md explains where to get it"
DAMAGED = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(OSError, RuntimeError, TypeError, ValueError),
)
"""Exceptions that libraries raise for model configurations with unknown values or wrong types."""


def locate(source: str, names: Sequence[str]) -> Path:
    """Return the file that ``source`` names, downloading it from the hub once if necessary.

    ``source`` is a file, a directory that holds one of ``names`` (the first found wins), or a hub
    id "owner/name", or "owner/name:file" to name the file there. A path that starts with
    ``shapes/`` is also looked up in the shipped tree.

    Raises ScorerSetupError, in one line that says what was looked for.
    """
    path = local(source, names)
    if path is not None:
        return path
    repo, _, file = source.partition(":")
    return _download(repo, (file,) if file else names)


def repository(source: str, names: Sequence[str]) -> str | None:
    """Return the hub repository that ``source`` names; None for a path. Raises like ``local``."""
    return source.partition(":")[0] if local(source, names) is None else None


def local(source: str, names: Sequence[str]) -> Path | None:
    """Return the local file that ``source`` names, without network access; None for a hub id.

    Otherwise as ``locate``. Raises ScorerSetupError if ``source`` is neither.
    """
    path = Path(os.path.expanduser(source))  # Path.expanduser raises if there is no such user
    if not path.is_absolute() and not os.path.exists(path) and source.startswith("shapes/"):
        path = ROOT / path
    try:
        return _existing_file(path, names) or _require_hub_id(source)
    except OSError as error:  # no permission, a name too long, a loop of links
        raise ScorerSetupError(
            f"{source!r} cannot be read ({error.strerror or error}): give another path; {ADVICE}"
        ) from None


def _existing_file(path: Path, names: Sequence[str]) -> Path | None:
    if is_file(path):
        return path
    if is_dir(path):
        file = next((path / name for name in names if is_file(path / name)), None)
        if file is None:
            raise ScorerSetupError(
                f"{str(path)!r} contains none of {', '.join(names)}: give the path of the file;"
                f" {ADVICE}"
            )
        return file
    return None


def _require_hub_id(source: str) -> None:
    """Raise ScorerSetupError unless ``source`` has the form of a hub id."""
    if (
        HUB_ID.fullmatch(source) is None
        or source.startswith("shapes/")
        or source.endswith(FILE_ENDINGS)
        and ":" not in source
    ):
        advice = "build it with `make shapes-clip`" if source.startswith("shapes/") else ADVICE
        raise ScorerSetupError(
            f"checkpoint {source!r} not found: give a file, a directory, or a hub id owner/name;"
            f" {advice}"
        )


def fetch(repo: str, name: str) -> Path | None:
    """Return a file of the hub's ``repo`` or of the local cache; None if ``repo`` has no such file.

    Raises ScorerSetupError if that cannot be determined, for example without a network.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo, name))
    # LocalEntryNotFoundError, although an EntryNotFoundError, means that the hub did not answer
    except Exception as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return None
        raise ScorerSetupError(
            f"{repo!r} is not a file or directory, and the hub could not be searched for {name}"
            f" ({error_summary(error, 200)}): download it on a machine with a network, into a"
            f" directory with the weights, and give its path; {ADVICE}"
        ) from None


def _download(repo: str, names: Sequence[str]) -> Path:
    """Return the first of ``names`` that ``repo`` has, from the local cache or else the hub."""
    from huggingface_hub import hf_hub_download

    why = ""
    for name in names:
        try:
            return Path(hf_hub_download(repo, name))
        # no network, no such repository, no such file: the caller gets one line for all of them
        except Exception as error:
            why = error_summary(error, 200)
    raise ScorerSetupError(
        f"{repo!r} is not a file or directory, and {' or '.join(names)} cannot be downloaded from"
        f" the hub ({why}): download it on a machine with a network and give its path; {ADVICE}"
    )


def pretrained(kind: Any, place: str | Path, **settings: object) -> Any:
    """Load a transformers model of class ``kind`` with all of its weights.

    Raises ValueError if weights are missing, which transformers would silently initialize, and
    ScorerSetupError if weights are not finite.
    """
    model, loading_info = kind.from_pretrained(
        place, use_safetensors=True, output_loading_info=True, **settings
    )
    # only parameters count: buffers that a file lacks are computed
    missing = sorted(
        {name for name, _ in model.named_parameters()} & set(loading_info["missing_keys"])
    )
    if missing:
        raise ValueError(f"{len(missing)} weights are missing, such as {missing[0]}")
    require_finite(model.state_dict(), place)
    return model


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """Read weights as ``records.weights.read_state``, but raise ScorerSetupError."""
    try:
        return weights.read_state(path)
    except weights.UnreadableWeights as error:
        raise ScorerSetupError(str(error)) from None


def load_weights(make: Callable[[], M], state: dict[str, torch.Tensor], path: Path, what: str) -> M:
    """Return the model that ``make`` builds, with the weights ``state``.

    Raises ScorerSetupError if a name, a shape or a type differs, or a weight is not finite.
    """
    with torch.device("meta"):  # a wrong configuration may describe a model of any size
        own = make().state_dict()
    scalars = {
        name for name in own.keys() & state.keys() if own[name].numel() == 1 == state[name].numel()
    }
    state = {
        name: value.reshape(own[name].shape) if name in scalars else value
        for name, value in state.items()
    }
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or extra:
        first = f"missing {missing[0]!r}" if missing else f"unknown {extra[0]!r}"
        raise ScorerSetupError(
            f"{path}: not the weights of {what}: {len(missing)} names are missing, {len(extra)}"
            f" are unknown, such as {first}; set architecture to that of the checkpoint"
        )
    for name, value in own.items():
        if value.shape != state[name].shape:
            raise ScorerSetupError(
                f"{path}: not the weights of {what}: {name!r} is {list(state[name].shape)}, not"
                f" {list(value.shape)}; set architecture to that of the checkpoint"
            )
        if value.is_floating_point() != state[name].is_floating_point():
            raise ScorerSetupError(
                f"{path}: not the weights of {what}: {name!r} is {state[name].dtype}, not"
                f" {value.dtype}"
            )
    require_finite(state, path)
    model = make()
    model.load_state_dict(state)
    return model


def require_finite(state: Mapping[str, torch.Tensor], path: str | Path) -> None:
    """Raise ScorerSetupError if a weight is infinite or NaN, since no score would be finite."""
    for name, value in state.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise ScorerSetupError(
                f"{path}: {name!r} contains values that are not finite: the file is damaged;"
                f" {ADVICE}"
            )
