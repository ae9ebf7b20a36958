"""A learned scorer's weights, from a file, a directory or a hub id; reading them runs no code."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from records import weights
from records.errors import described
from rewards.base import ScorerSetupError

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>[^:]+))?")
FILE_ENDINGS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".txt")
"""A name that ends so is a file's, not a repository's."""
ROOT = Path(__file__).parent.parent
M = TypeVar("M", bound=torch.nn.Module)
ADVICE = "docs/rewards.md says where to get it"
DAMAGED = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(OSError, RuntimeError, TypeError, ValueError),
)
"""What libraries raise for descriptions of models with other values, or values of other types, than
they know.
"""


def locate(source: str, names: Sequence[str]) -> Path:
    """The file that ``source`` stands for: one that is here, or the hub's, fetched once.

    ``source`` is a file, a directory that holds one of ``names`` (the first found wins), or a hub
    id "owner/name", or "owner/name:file" to name the file there. Paths that start with ``shapes/``
    are found in the shipped tree as well.

    Raises ScorerSetupError, one line that says what was looked for.
    """
    here = local(source, names)
    if here is not None:
        return here
    repo, _, file = source.partition(":")
    return _download(repo, (file,) if file else names)


def repository(source: str, names: Sequence[str]) -> str | None:
    """The hub's repository that ``source`` names; None for a path. Raises as ``local`` does."""
    return source.partition(":")[0] if local(source, names) is None else None


def local(source: str, names: Sequence[str]) -> Path | None:
    """As ``locate`` without a network: None for a hub id. Raises ScorerSetupError for no file."""
    path = Path(os.path.expanduser(source))  # Path's own raises where there is no such user
    if not path.is_absolute() and not os.path.exists(path) and source.startswith("shapes/"):
        path = ROOT / path
    try:
        return _here(path, names) or _hub_id(source)
    except OSError as error:  # a right that is missing, a name too long, links in a circle
        raise ScorerSetupError(
            f"{source!r} cannot be read ({error.strerror or error}): give another path; {ADVICE}"
        ) from None


def _here(path: Path, names: Sequence[str]) -> Path | None:
    if path.is_file():
        return path
    if path.is_dir():
        found = next((path / name for name in names if (path / name).is_file()), None)
        if found is None:
            raise ScorerSetupError(
                f"{str(path)!r} holds none of {', '.join(names)}: give the file itself; {ADVICE}"
            )
        return found
    return None


def _hub_id(source: str) -> None:
    """Raises ScorerSetupError where ``source`` names no repository of the hub."""
    if (
        HUB_ID.fullmatch(source) is None
        or source.startswith("shapes/")
        or source.endswith(FILE_ENDINGS)
        and ":" not in source
    ):
        made = "build it with `make shapes-clip`" if source.startswith("shapes/") else ADVICE
        raise ScorerSetupError(
            f"there is no checkpoint {source!r}: give a file, a directory, or a hub id owner/name;"
            f" {made}"
        )


def fetch(repo: str, name: str) -> Path | None:
    """A file of the hub's ``repo``, or of the local cache; None: the repository has no such file.

    Raises ScorerSetupError where that is not known, as without a network.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo, name))
    # LocalEntryNotFoundError, an EntryNotFoundError, is that of a hub which did not answer
    except Exception as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return None
        raise ScorerSetupError(
            f"{repo!r} is no file or directory here, and the hub does not say whether it has {name}"
            f" ({described(error, 200)}): fetch it where there is a network, into a directory with"
            f" the weights, and give its path; {ADVICE}"
        ) from None


def _download(repo: str, names: Sequence[str]) -> Path:
    """The first of ``names`` that the hub's ``repo`` has, from the local cache if it is there."""
    from huggingface_hub import hf_hub_download

    why = ""
    for name in names:
        try:
            return Path(hf_hub_download(repo, name))
        # no network, no such repository, no such file: the caller gets one line for all of them
        except Exception as error:
            why = described(error, 200)
    raise ScorerSetupError(
        f"{repo!r} is no file or directory here, and the hub does not give {' or '.join(names)} of"
        f" it ({why}): fetch it where there is a network and give its path; {ADVICE}"
    )


def pretrained(kind: Any, place: str | Path, **settings: object) -> Any:
    """transformers' model of class ``kind``; where weights are missing it would make some up and go
    on: here ValueError is raised. Raises ScorerSetupError for weights that are not finite.
    """
    model, told = kind.from_pretrained(
        place, use_safetensors=True, output_loading_info=True, **settings
    )
    # buffers are computed where a file lacks them
    absent = sorted({name for name, _ in model.named_parameters()} & set(told["missing_keys"]))
    if absent:
        raise ValueError(f"{len(absent)} weights are missing, the first: {absent[0]}")
    require_finite(model.state_dict(), place)
    return model


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """As ``records.weights.read_state``. Raises ScorerSetupError."""
    try:
        return weights.read_state(path)
    except weights.UnreadableWeights as error:
        raise ScorerSetupError(str(error)) from None


def load_weights(make: Callable[[], M], state: dict[str, torch.Tensor], path: Path, what: str) -> M:
    """The model that ``make`` builds, with ``state`` in it. Raises ScorerSetupError where a name, a
    shape or a type differs, and for a weight that is no finite number.
    """
    with torch.device("meta"):  # a description of another model may be of one without end
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
            f"{path}: no weights of {what}: {len(missing)} names missing, {len(extra)} unknown, the"
            f" first: {first}; set architecture to what the checkpoint was trained as"
        )
    for name, value in own.items():
        if value.shape != state[name].shape:
            raise ScorerSetupError(
                f"{path}: no weights of {what}: {name!r} is {list(state[name].shape)}, not"
                f" {list(value.shape)}; set architecture to what the checkpoint was trained as"
            )
        if value.is_floating_point() != state[name].is_floating_point():
            raise ScorerSetupError(
                f"{path}: no weights of {what}: {name!r} is {state[name].dtype}, not {value.dtype}"
            )
    require_finite(state, path)
    model = make()
    model.load_state_dict(state)
    return model


def require_finite(state: Mapping[str, torch.Tensor], path: str | Path) -> None:
    """Raises ScorerSetupError for a weight that is infinite or no number: no score would be one."""
    for name, value in state.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise ScorerSetupError(
                f"{path}: {name!r} holds values that are not finite: the file is damaged; {ADVICE}"
            )
