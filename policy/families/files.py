"""Lookup, reading and checking of a diffusers pipeline's files.

They are in a local directory or come from the hub through its cache. Errors for missing or broken
files are one line and name ``model.path``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from configs.paths import exists, is_dir, is_file
from configs.section import Tree
from configs.sections import Model
from records.errors import first_line

SHAPES_DIRECTORY = Path(__file__).resolve().parents[2] / "shapes" / "model"
SHAPES_DECODER = SHAPES_DIRECTORY.with_name("decoder")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
INDEX = "model_index.json"
LIBRARIES = ("diffusers", "transformers")


def is_local(model: Model) -> bool:
    """Return True if ``model.path`` is a path of this machine, not a hub id to look up."""
    return model.path == "shapes" or exists(Path(model.path).expanduser())


def model_directory(model: Model) -> str:
    """Return the pipeline directory of ``model.path``, or the path itself if it is a hub id.

    Raises FileNotFoundError if there is no directory at the path, ValueError if the directory is
    not a diffusers pipeline.
    """
    if model.path == "shapes":
        directory, advice = SHAPES_DIRECTORY, "build it with `make shapes-model`"
    else:
        directory = Path(model.path).expanduser()
        advice = "give a diffusers pipeline directory, a hub id, or 'shapes'"
        if not exists(directory) and HUB_ID.fullmatch(model.path):
            return model.path
    if not is_dir(directory):
        raise FileNotFoundError(f"model.path: no directory {str(directory)!r}: {advice}")
    if not is_file(directory / INDEX):
        raise ValueError(
            f"model.path: {str(directory)!r} has no {INDEX}, so it is not a diffusers pipeline:"
            f" {advice}"
        )
    return str(directory)


class PipelineFile(Tree):
    """Content of a pipeline's JSON file, in which a missing key raises ValueError, not KeyError."""

    def __init__(self, content: Tree, name: str, directory: str) -> None:
        super().__init__(content)
        self._where = f"{name} of {directory!r}"

    def __missing__(self, key: str) -> object:
        raise ValueError(f"model.path: {self._where} has no {key!r}: download the pipeline again")


def pipeline_file(directory: str, name: str) -> Tree:
    """Read a JSON file of a pipeline directory, or of a hub id (from the cache or the network).

    Raises FileNotFoundError if it is missing or cannot be downloaded, ValueError if it is not a
    JSON object.
    """
    path = Path(directory) / name
    if not is_dir(Path(directory)):
        path = _from_hub(directory, name)
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(
            f"model.path: {directory!r} has no {name}: download the complete pipeline"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"model.path: {name} of {directory!r} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(
            f"model.path: {name} of {directory!r} is not a JSON object: download the pipeline again"
        )
    return PipelineFile(content, name, directory)


def _from_hub(repository: str, name: str) -> Path:
    """Return the local path of a hub id's file; download it unless it is in the cache.

    Raises FileNotFoundError if it cannot be downloaded.
    """
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import HfHubHTTPError

    cached = try_to_load_from_cache(repository, name)
    if isinstance(cached, str):
        return Path(cached)
    try:
        # one request first, as the download itself retries for minutes without a network
        get_hf_file_metadata(hf_hub_url(repository, name))
        return Path(hf_hub_download(repository, name))
    except HfHubHTTPError as error:
        why = first_line(error)
    except Exception as error:  # the client's network errors have no other common class
        why = (
            "it is not in the cache of this machine and the hub cannot be reached"
            f" ({type(error).__name__})"
        )
    raise FileNotFoundError(
        f"model.path: {name} of {repository!r} cannot be downloaded: {why}: run `hf download"
        f" {repository}` on a machine with a network, or give a local pipeline directory"
    )


def _shards(index: Path) -> list[str]:
    """Return the files that an index of sharded weights names. Raises ValueError if unreadable."""
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"model.path: {str(index)!r} cannot be read ({type(error).__name__}): download it again"
        ) from None


def missing_weights(folder: Path) -> str | None:
    """Return the first missing file of a part's weights by name, or None if all are there.

    Raises ValueError if an index of sharded weights cannot be read.
    """
    requested = {
        file for index in folder.glob("*.safetensors.index.json") for file in _shards(index)
    } or {"*.safetensors"}
    return next((name for name in sorted(requested) if not any(folder.glob(name))), None)


def check_libraries(directory: str, index: Tree) -> None:
    """Raise ValueError if a part is of a library other than diffusers and transformers.

    The library would be imported, and the file that names it may come from anybody.
    """
    for part, entry in index.items():
        if isinstance(entry, list) and entry and entry[0] not in (None, *LIBRARIES):
            raise ValueError(
                f"model.path: the {part!r} of {directory!r} is of {entry[0]!r}: only parts from"
                f" {' and '.join(LIBRARIES)} are loaded"
            )


def check_component(
    directory: str, index: Tree, part: str, classes: tuple[str, ...], family: str
) -> None:
    """Check one part of a pipeline.

    Raises FileNotFoundError if the pipeline lacks the part, ValueError if ``index`` gives it a
    class other than ``classes``, those that the family accepts (empty: any).
    """
    listed = (index.get(part) or [None, None])[-1]
    local = is_dir(Path(directory))
    if listed is None or (local and not is_dir(Path(directory) / part)):
        raise FileNotFoundError(
            f"model.path: {directory!r} lacks its {part!r}, which family {family!r} needs:"
            " download the complete pipeline"
        )
    if classes and listed not in classes:
        raise ValueError(
            f"model.path: the {part!r} of {directory!r} is a {listed}; family {family!r} takes"
            f" {' or '.join(classes)}"
        )
