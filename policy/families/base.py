"""What a family of text-to-image models has to say about itself. sigma is in [0, 1] everywhere outside a family."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from configs.schema import Model
from policy.types import Conditioning

SHAPES_DIRECTORY = Path(__file__).resolve().parents[2] / "shapes" / "model"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def model_directory(model: Model) -> str:
    """The pipeline directory of ``model.path``, or the hub id itself when it is no local path.

    Raises FileNotFoundError when there is nothing at the path, ValueError when what is there is no pipeline directory.
    """
    if model.path == "shapes":
        directory, mend = SHAPES_DIRECTORY, "build it with `make shapes-model`"
    else:
        directory, mend = Path(model.path).expanduser(), "give a diffusers pipeline directory, a hub id, or 'shapes'"
        if not directory.exists() and HUB_ID.fullmatch(model.path):
            return model.path
    if not directory.is_dir():
        raise FileNotFoundError(f"model.path: there is no directory {str(directory)!r}: {mend}")
    if not (directory / "model_index.json").is_file():
        raise ValueError(f"model.path: {str(directory)!r} has no model_index.json, so it is no diffusers pipeline: {mend}")
    return str(directory)


class TextEncoder(Protocol):
    """Prompts in, conditioning out."""

    def encode(self, prompts: list[str]) -> Conditioning:
        """Conditioning with one row per prompt. A row depends on its own prompt alone, not on its neighbours."""
        ...


class Family(ABC):
    """One model of one family. Holds configuration only; weights are loaded by the ``load_*`` methods.

    ``lora_targets`` are module-name suffixes; ``keep_wide`` are fnmatch patterns of modules that are never quantised;
    ``pipeline_class`` is the diffusers class that model_index.json must name.
    """

    name: str
    pipeline_class: str
    lora_targets: tuple[str, ...]
    keep_wide: tuple[str, ...]
    fuse: tuple[tuple[str, ...], ...] = ()

    def __init__(self, model: Model) -> None:
        self.model = model
        self.directory = model_directory(model)
        index = Path(self.directory) / "model_index.json"
        if index.is_file():
            found = json.loads(index.read_text()).get("_class_name")
            if found != self.pipeline_class:
                raise ValueError(
                    f"model.path: {self.directory!r} holds a {found}, but family {self.name!r} is a {self.pipeline_class}: "
                    "change model.path or model.family"
                )

    def load(self, cls: Any, subfolder: str, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """``cls.from_pretrained`` of a part of the pipeline: eval mode, no gradients. FileNotFoundError when it is missing."""
        try:
            module = cls.from_pretrained(self.directory, subfolder=subfolder, dtype=dtype)
        except OSError as error:
            reason = str(error).strip().splitlines()[0]
            raise FileNotFoundError(f"model.path: cannot load {subfolder!r} of {self.directory!r}: {reason}") from error
        return module.to(device).eval().requires_grad_(False)

    def part_config(self, cls: Any, subfolder: str) -> dict[str, Any]:
        """The configuration file of a part of the pipeline, without its weights."""
        try:
            return cls.load_config(self.directory, subfolder=subfolder)
        except OSError as error:
            reason = str(error).strip().splitlines()[0]
            raise FileNotFoundError(f"model.path: no configuration of {subfolder!r} in {self.directory!r}: {reason}") from error

    @property
    @abstractmethod
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one latent, without the batch dimension."""

    @abstractmethod
    def load_text(self, device: torch.device | str, dtype: torch.dtype) -> TextEncoder:
        """Text encoders and tokenizers, nothing else."""

    @abstractmethod
    def load_transformer(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """The denoiser, in eval mode, without gradients."""

    @abstractmethod
    def load_vae(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """The autoencoder, in eval mode, without gradients."""

    @abstractmethod
    def sigmas(self, steps: int) -> Tensor:
        """The sampling schedule: float32 [steps + 1] on the CPU, strictly descending, last 0."""

    @abstractmethod
    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """v = eps - x0 of the denoiser: float32 [B, *latent] for x [B, *latent], sigma 0-dim or [B], cond of B rows."""

    @abstractmethod
    def decode(self, vae: nn.Module, latents: Tensor, batch_size: int | None = None) -> Tensor:
        """Pictures of latents [B, *latent]: uint8 [B, 3, H, W] on the CPU."""
