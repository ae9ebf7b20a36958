"""A diffusers pipeline: where its files lie, what they say, and its parts loaded from them.

The files are in a local directory, or come from the hub by its cache. What is missing or broken is
one line that names ``model.path``.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from configs.section import Tree
from configs.sections import Model
from policy.experts import EXPERTS, Experts
from records.errors import first_line

SHAPES_DIRECTORY = Path(__file__).resolve().parents[2] / "shapes" / "model"
SHAPES_DECODER = SHAPES_DIRECTORY.with_name("decoder")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
INDEX = "model_index.json"
LIBRARIES = ("diffusers", "transformers")
TIMESTEPS = 1000.0
"""Training timesteps of every supported model: their `timestep` is 1000 sigma."""
Diffusers = Any
"""A pipeline, transformer or autoencoder of diffusers, whose attributes are set at run time."""


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


def _missing_weights(folder: Path) -> str | None:
    """Which file of a part's weights a directory lacks, first by name; None: it has them all.

    Raises ValueError for an index that cannot be read.
    """
    wanted = {
        file for index in folder.glob("*.safetensors.index.json") for file in _shards(index)
    } or {"*.safetensors"}
    return next((name for name in sorted(wanted) if not any(folder.glob(name))), None)


def _check_libraries(directory: str, index: Tree) -> None:
    """Raises ValueError for a part of another library: it would be imported, and anybody may have
    written the file.
    """
    for part, entry in index.items():
        if isinstance(entry, list) and entry and entry[0] not in (None, *LIBRARIES):
            raise ValueError(
                f"model.path: the {part!r} of {directory!r} is of {entry[0]!r}: parts are loaded"
                f" from {' and '.join(LIBRARIES)} alone"
            )


def _check_component(
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


class Pipeline:
    """A diffusers pipeline of one family: its configuration files, and its parts once loaded.

    ``pipeline_class`` is the diffusers class that model_index.json must name; ``components`` are
    the parts of it that are needed, with the classes that will do (none: any), and ``optional``
    those that are needed where it lists them.
    """

    name: str
    pipeline_class: str
    components: dict[str, tuple[str, ...]]
    optional: dict[str, tuple[str, ...]] = {}

    def __init__(self, model: Model) -> None:
        """Reads model_index.json. Raises FileNotFoundError or ValueError, one line, when this is no
        whole pipeline of the family.
        """
        self.model = model
        self._configs: dict[str, Tree] = {}
        self.directory = model_directory(model)
        self.index = pipeline_file(self.directory, INDEX)
        found = self.index.get("_class_name")
        if found != self.pipeline_class:
            raise ValueError(
                f"model.path: {self.directory!r} holds a {found}, but family {self.name!r} is a"
                f" {self.pipeline_class}: change model.path or model.family"
            )
        _check_libraries(self.directory, self.index)
        listed = [part for part in self.optional if (self.index.get(part) or [None])[-1]]
        self.components = self.components | {part: self.optional[part] for part in listed}
        for part, classes in self.components.items():
            _check_component(self.directory, self.index, part, classes, self.name)

    def check_weights(self) -> None:
        """Raises FileNotFoundError where a part has no weights as safetensors.

        Looks into a local directory only: of a hub id every actor fetches its own parts.
        """
        for part in self.components if Path(self.directory).is_dir() else ():
            if part in ("scheduler", "processor") or part.startswith("tokenizer"):
                continue
            if missing := _missing_weights(Path(self.directory) / part):
                raise FileNotFoundError(
                    f"model.path: the {part!r} of {self.directory!r} lacks its weights, {missing}:"
                    " download the whole pipeline, as safetensors (no other format is read)"
                )

    def part_config(self, part: str) -> Tree:
        """The configuration file of a part of the pipeline, without its weights."""
        if part not in self._configs:
            name = "scheduler_config.json" if part == "scheduler" else "config.json"
            self._configs[part] = pipeline_file(self.directory, f"{part}/{name}")
        return self._configs[part]

    def import_parts(self) -> None:
        """Import the pipeline and what its parts are made of, and load nothing."""
        import diffusers

        assert getattr(diffusers, self.pipeline_class)  # both libraries import on access
        for part in self.components:
            library, name = self.index[part]
            assert getattr(importlib.import_module(library), name)

    def load(self, part: str, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """A diffusers model of the pipeline: eval mode, no gradients.

        Raises FileNotFoundError when its weights are missing.
        """
        import diffusers

        cls = getattr(diffusers, self.components[part][0])
        return self._whole(part, cls, dtype).to(device).eval().requires_grad_(False)

    def _whole(self, part: str, cls: Diffusers, dtype: torch.dtype) -> Diffusers:
        """A model with all its weights. The libraries make up what is missing, and go on.

        Raises FileNotFoundError.
        """
        told = {"subfolder": part, "dtype": dtype, "output_loading_info": True}
        model, found = self._pretrained(cls, repr(part), **told)
        weights = {name for name, _ in model.named_parameters()}
        if absent := sorted(weights & set(found["missing_keys"])):
            raise FileNotFoundError(
                f"model.path: the {part!r} of {self.directory!r} lacks {len(absent)} of its"
                f" {len(weights)} weights, the first: {absent[0]}: download it again"
            )
        return model

    def _pretrained(self, cls: Diffusers, what: str, **named: object) -> Diffusers:
        try:
            return cls.from_pretrained(self.directory, **named, use_safetensors=True)
        except OSError as error:
            raise FileNotFoundError(
                f"model.path: cannot load {what} of {self.directory!r}: {first_line(error)}"
            ) from error

    @property
    def transformers(self) -> tuple[str, ...]:
        """The parts that are its denoiser."""
        return tuple(part for part in EXPERTS if part in self.components)

    @cached_property
    def boundary(self) -> float | None:
        """The timestep below which the second of two transformers denoises; None: there is one.

        Raises ValueError where the pipeline names none.
        """
        if len(self.transformers) == 1:
            return None
        share = self.index.get("boundary_ratio")
        if not isinstance(share, int | float) or not 0 < share < 1:
            raise ValueError(
                f"model.path: {self.directory!r} has two transformers, and its boundary_ratio,"
                f" {share!r}, is no number between 0 and 1: download the pipeline again"
            )
        return share * TIMESTEPS

    def denoiser(self, make: Callable[[str], nn.Module]) -> nn.Module:
        """The denoiser of its transformers, each as ``make`` makes it by the part's name."""
        made = [make(part) for part in self.transformers]
        return made[0] if self.boundary is None else Experts(*made, self.boundary)

    def load_transformer(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """The denoiser, in eval mode, without gradients."""
        return self.denoiser(lambda part: self.load(part, device, dtype))

    def skeleton(self) -> nn.Module:
        """The denoiser on the meta device: every module and shape, no weights and no memory."""
        return self.denoiser(self._skeleton)

    def _skeleton(self, part: str) -> nn.Module:
        import diffusers

        cls = getattr(diffusers, self.components[part][0])
        with torch.device("meta"):
            return cls.from_config(self.part_config(part)).eval().requires_grad_(False)

    def load_vae(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """The autoencoder, in eval mode, without gradients; slicing and tiling as configured."""
        vae: Diffusers = self.load("vae", device, dtype)
        if self.model.vae_slicing:
            vae.enable_slicing()
        if self.model.vae_tiling:
            vae.enable_tiling()
        return vae
