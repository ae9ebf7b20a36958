"""A diffusers pipeline: its configuration files, and its parts loaded from them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from configs.section import Tree
from configs.sections import Model
from policy.experts import EXPERTS, Experts
from policy.families.architectures import build
from policy.families.files import (
    INDEX,
    check_component,
    check_libraries,
    missing_weights,
    model_directory,
    pipeline_file,
)
from records.errors import first_line

TIMESTEPS = 1000.0
"""Training timesteps of every supported model: their `timestep` is 1000 sigma."""
Diffusers = Any
"""A pipeline, transformer or autoencoder of diffusers, whose attributes are set at run time."""


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
        check_libraries(self.directory, self.index)
        listed = [part for part in self.optional if (self.index.get(part) or [None])[-1]]
        self.components = self.components | {part: self.optional[part] for part in listed}
        for part, classes in self.components.items():
            check_component(self.directory, self.index, part, classes, self.name)

    def check_weights(self) -> None:
        """Raises FileNotFoundError where a part has no weights as safetensors.

        Looks into a local directory only: of a hub id every actor fetches its own parts.
        """
        for part in self.components if Path(self.directory).is_dir() else ():
            if part in ("scheduler", "processor") or part.startswith("tokenizer"):
                continue
            if missing := missing_weights(Path(self.directory) / part):
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

    @cached_property
    def stock(self) -> Diffusers:
        """The class of the diffusers pipeline."""
        import diffusers

        return getattr(diffusers, self.pipeline_class)

    def import_parts(self) -> None:
        """Import the pipeline and what its parts are made of, and load nothing."""
        assert self.stock  # both libraries import on access
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
        # parameters alone: a buffer that files lack is made by its module
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
        first, second = EXPERTS
        if self.boundary is None:
            return make(first)
        return Experts(make(first), make(second), self.boundary)

    def load_transformer(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """The denoiser, in eval mode, without gradients."""
        return self.denoiser(lambda part: self.load(part, device, dtype))

    def skeleton(self) -> nn.Module:
        """The denoiser on the meta device: every module and shape, no weights and no memory."""

        def made(part: str) -> nn.Module:
            kind = f"diffusers.{self.components[part][0]}"
            return build({"class": kind, "config": self.part_config(part)})

        return self.denoiser(made)

    def load_vae(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """The autoencoder, in eval mode, without gradients; slicing and tiling as configured."""
        vae: Diffusers = self.load("vae", device, dtype)
        if self.model.vae_slicing:
            vae.enable_slicing()
        if self.model.vae_tiling:
            vae.enable_tiling()
        return vae
