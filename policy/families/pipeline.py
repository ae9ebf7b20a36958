"""Loading of a diffusers pipeline's configuration files and parts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from configs.paths import is_dir
from configs.section import Tree
from configs.sections import Model
from policy.experts import EXPERTS, Experts
from policy.families.architectures import build
from policy.families.architectures.matching import find_by_configs
from policy.families.files import (
    INDEX,
    check_component,
    check_libraries,
    missing_weights,
    model_directory,
    pipeline_file,
)
from records.errors import first_line, joined_lines

TIMESTEPS = 1000.0
"""Number of training timesteps of every supported model: its timestep is 1000 sigma."""
Diffusers = Any
"""Type of diffusers' pipelines, transformers and autoencoders: they set attributes at run time."""


class Pipeline:
    """A diffusers pipeline of one family: its configuration files, and loaders of its parts.

    ``pipeline_class`` is the diffusers class that model_index.json must name. ``components`` maps
    the required parts to their accepted classes (empty: any). ``optional`` has parts that are
    required only if model_index.json lists them.
    """

    name: str
    pipeline_class: str
    components: dict[str, tuple[str, ...]]
    optional: dict[str, tuple[str, ...]] = {}

    def __init__(self, model: Model) -> None:
        """Read model_index.json and check it.

        Raises FileNotFoundError or ValueError, with a message of one line, if this is not a
        complete pipeline of the family.
        """
        self.model = model
        self._configs: dict[str, Tree] = {}
        self.directory = model_directory(model)
        self.index = pipeline_file(self.directory, INDEX)
        actual = self.index.get("_class_name")
        if actual != self.pipeline_class:
            raise ValueError(
                f"model.path: {self.directory!r} holds a {actual}, but family {self.name!r} is a"
                f" {self.pipeline_class}: change model.path or model.family"
            )
        check_libraries(self.directory, self.index)
        listed = [part for part in self.optional if (self.index.get(part) or [None])[-1]]
        self.components = self.components | {part: self.optional[part] for part in listed}
        for part, classes in self.components.items():
            check_component(self.directory, self.index, part, classes, self.name)

    def check_weights(self) -> None:
        """Raise FileNotFoundError if a part has no weights in safetensors format.

        Only a local directory is checked: from a hub id every actor downloads its own parts.
        """
        for part in self.components if is_dir(Path(self.directory)) else ():
            if part in ("scheduler", "processor") or part.startswith("tokenizer"):
                continue
            if missing := missing_weights(Path(self.directory) / part):
                raise FileNotFoundError(
                    f"model.path: the {part!r} of {self.directory!r} lacks its weights, {missing}:"
                    " download the complete pipeline, as safetensors (other formats are not read)"
                )

    def part_config(self, part: str) -> Tree:
        """Return the content of a part's configuration file."""
        if part not in self._configs:
            name = "scheduler_config.json" if part == "scheduler" else "config.json"
            self._configs[part] = pipeline_file(self.directory, f"{part}/{name}")
        return self._configs[part]

    @cached_property
    def published(self) -> str | None:
        """Hub id of the published model that has the same architecture, or None."""
        return find_by_configs(self.index, self.part_config)

    @cached_property
    def stock(self) -> Diffusers:
        """The diffusers class of the pipeline."""
        import diffusers

        return getattr(diffusers, self.pipeline_class)

    def import_parts(self) -> None:
        """Import the classes of the pipeline and of its parts without loading weights."""
        assert self.stock  # diffusers and transformers import lazily, on attribute access
        for part in self.components:
            library, name = self.index[part]
            assert getattr(importlib.import_module(library), name)

    def load(self, part: str, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """Load a diffusers model of the pipeline in eval mode, without gradients.

        Raises FileNotFoundError if weights are missing.
        """
        import diffusers

        cls = getattr(diffusers, self.components[part][0])
        return self._load_complete(part, cls, dtype).to(device).eval().requires_grad_(False)

    def _load_complete(self, part: str, cls: Diffusers, dtype: torch.dtype) -> Diffusers:
        """Load a model, and raise FileNotFoundError if weights are missing.

        The libraries would initialize missing weights at random and continue.
        """
        options = {"subfolder": part, "dtype": dtype, "output_loading_info": True}
        model, info = self._pretrained(cls, repr(part), **options)
        # only parameters: buffers that are not in the files are computed by their modules
        weights = {name for name, _ in model.named_parameters()}
        if absent := sorted(weights & set(info["missing_keys"])):
            raise FileNotFoundError(
                f"model.path: the {part!r} of {self.directory!r} lacks {len(absent)} of its"
                f" {len(weights)} weights, such as {absent[0]}: download it again"
            )
        return model

    def _pretrained(self, cls: Diffusers, what: str, **options: object) -> Diffusers:
        """Call ``cls.from_pretrained`` with safetensors only.

        Raises FileNotFoundError if files are missing, ValueError if they do not fit the class.
        """
        try:
            return cls.from_pretrained(self.directory, **options, use_safetensors=True)
        except OSError as error:
            raise FileNotFoundError(
                f"model.path: cannot load {what} of {self.directory!r}: {first_line(error)}"
            ) from error
        except RuntimeError:  # of the device, such as no memory
            raise
        except Exception as error:  # the libraries have no common class for invalid files
            raise ValueError(
                f"model.path: cannot load {what} of {self.directory!r} from its files"
                f" ({joined_lines(error)}): download the pipeline again"
            ) from error

    @property
    def transformers(self) -> tuple[str, ...]:
        """Names of the parts that make up the denoiser."""
        return tuple(part for part in EXPERTS if part in self.components)

    @cached_property
    def boundary(self) -> float | None:
        """Timestep below which the second of two transformers denoises, None if there is only one.

        Raises ValueError if a pipeline with two transformers has no valid ``boundary_ratio``.
        """
        if len(self.transformers) == 1:
            return None
        share = self.index.get("boundary_ratio")
        if not isinstance(share, int | float) or not 0 < share < 1:
            raise ValueError(
                f"model.path: {self.directory!r} has two transformers, and its boundary_ratio,"
                f" {share!r}, is not a number between 0 and 1: download the pipeline again"
            )
        return share * TIMESTEPS

    def denoiser(self, make: Callable[[str], nn.Module]) -> nn.Module:
        """Build the denoiser; ``make`` returns the transformer with the given part name."""
        first, second = EXPERTS
        if self.boundary is None:
            return make(first)
        return Experts(make(first), make(second), self.boundary)

    def load_transformer(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """Load the denoiser in eval mode, without gradients."""
        return self.denoiser(lambda part: self.load(part, device, dtype))

    def skeleton(self) -> nn.Module:
        """Build the denoiser on the meta device: all modules and shapes, without memory."""

        def blank(part: str) -> nn.Module:
            kind = f"diffusers.{self.components[part][0]}"
            return build({"class": kind, "config": self.part_config(part)})

        return self.denoiser(blank)

    def load_vae(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """Load the autoencoder in eval mode, without gradients, with slicing and tiling as set."""
        vae: Diffusers = self.load("vae", device, dtype)
        if self.model.vae_slicing:
            vae.enable_slicing()
        if self.model.vae_tiling:
            vae.enable_tiling()
        return vae
