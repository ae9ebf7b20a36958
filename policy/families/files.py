"""A diffusers pipeline's files: where they lie, what they say, and what is missing among them.

They are in a local directory, or come from the hub by its cache. What is missing or broken is one
line that names ``model.path``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from configs.section import Tree
from configs.sections import Model
from records.errors import first_line

SHAPES_DIRECTORY = Path(__file__).resolve().parents[2] / "shapes" / "model"
SHAPES_DECODER = SHAPES_DIRECTORY.with_name("decoder")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
INDEX = "model_index.json"
LIBRARIES = ("diffusers", "transformers")


def model_directory(model: Model) -> str:
    """The pipeline directory of ``model.path``, or the hub id itself when it is no local path.

    Raises FileNotFoundError when there is nothing at the path, ValueError when what is there is no
    pipeline directory.
    """
    if model.path == "shapes":
        directory, advice = SHAPES_DIRECTORY, "build it with `make shapes-model`"
    else:
        directory = Path(model.path).expanduser()
        advice = "give a diffusers pipeline directory, a hub id, or 'shapes'"
        if not directory.exists() and HUB_ID.fullmatch(model.path):
            return model.path
    if not directory.is_dir():
        raise FileNotFoundError(f"model.path: there is no directory {str(directory)!r}: {advice}")
    if not (directory / INDEX).is_file():
        raise ValueError(
            f"model.path: {str(directory)!r} has no {INDEX}, so it is no diffusers pipeline:"
            f" {advice}"
        )
    return str(directory)


class PipelineFile(Tree):
    """A JSON object of a pipeline that says which file lacks what is looked up in it."""

    def __init__(self, found: Tree, name: str, directory: str) -> None:
        super().__init__(found)
        self._where = f"{name} of {directory!r}"

    def __missing__(self, key: str) -> object:
        raise ValueError(f"model.path: {self._where} has no {key!r}: download the pipeline again")


def pipeline_file(directory: str, name: str) -> Tree:
    """A JSON file of a pipeline directory or, through the hub's cache or the network, of a hub id.

    Raises FileNotFoundError when it is not there or cannot be fetched, ValueError when it is no
    JSON object.
    """
    path = Path(directory) / name
    if not Path(directory).is_dir():
        path = _from_hub(directory, name)
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(
            f"model.path: {directory!r} has no {name}: download the whole pipeline"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"model.path: {name} of {directory!r} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(
            f"model.path: {name} of {directory!r} is not a JSON object: download the pipeline again"
        )
    return PipelineFile(found, name, directory)


def _from_hub(repository: str, name: str) -> Path:
    """A file of a hub id, from the cache or the hub."""
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
        # ask once, as the download itself retries for minutes where there is no network
        get_hf_file_metadata(hf_hub_url(repository, name))
        return Path(hf_hub_download(repository, name))
    except HfHubHTTPError as error:
        why = first_line(error)
    except Exception as error:  # the client's network errors have no common class but this
        why = (
            "it is not in this machine's cache and the hub cannot be reached"
            f" ({type(error).__name__})"
        )
    raise FileNotFoundError(
        f"model.path: {name} of {repository!r} cannot be fetched: {why}: run `hf download"
        f" {repository}` where there is a network, or give a local pipeline directory"
    )


def _shards(index: Path) -> list[str]:
    """The files that an index of sharded weights names. Raises ValueError if it is unreadable."""
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"model.path: {str(index)!r} cannot be read ({type(error).__name__}): download it again"
        ) from None


def missing_weights(folder: Path) -> str | None:
    """Which file of a part's weights a directory lacks, first by name; None: it has them all.

    Raises ValueError for an index that cannot be read.
    """
    wanted = {
        file for index in folder.glob("*.safetensors.index.json") for file in _shards(index)
    } or {"*.safetensors"}
    return next((name for name in sorted(wanted) if not any(folder.glob(name))), None)


def check_libraries(directory: str, index: Tree) -> None:
    """Raises ValueError for a part of another library: it would be imported, and anybody may have
    written the file.
    """
    for part, entry in index.items():
        if isinstance(entry, list) and entry and entry[0] not in (None, *LIBRARIES):
            raise ValueError(
                f"model.path: the {part!r} of {directory!r} is of {entry[0]!r}: parts are loaded"
                f" from {' and '.join(LIBRARIES)} alone"
            )


def check_component(
    directory: str, index: Tree, part: str, classes: tuple[str, ...], family: str
) -> None:
    """Raises FileNotFoundError where a pipeline lacks a part, ValueError where ``index`` says that
    it is of none of the ``classes`` that the family takes (none: any).
    """
    listed = (index.get(part) or [None, None])[-1]
    local = Path(directory).is_dir()
    if listed is None or (local and not (Path(directory) / part).is_dir()):
        raise FileNotFoundError(
            f"model.path: {directory!r} lacks its {part!r}, which family {family!r} needs: download"
            " the whole pipeline"
        )
    if classes and listed not in classes:
        raise ValueError(
            f"model.path: the {part!r} of {directory!r} is a {listed}; family {family!r} takes"
            f" {' or '.join(classes)}"
        )
