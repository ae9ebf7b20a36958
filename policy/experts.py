"""A denoiser of two transformers: one expert for each range of noise levels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

EXPERTS = ("transformer", "transformer_2")
"""Their names in a pipeline: the expert for high noise levels, then that for low ones."""


class Experts(nn.Module):
    """Two diffusers transformers as one denoiser; the second handles timesteps below ``boundary``.

    eDiff-I (arXiv 2211.01324) calls them experts. Module paths begin with the names in ``EXPERTS``.
    """

    transformer: Any  # both are diffusers models
    transformer_2: Any

    def __init__(self, high: nn.Module, low: nn.Module, boundary: float) -> None:
        super().__init__()
        self.transformer, self.transformer_2 = high, low
        self.boundary = boundary

    def forward(
        self, timestep: Tensor, *, return_dict: bool = False, **rows: Tensor
    ) -> tuple[Tensor]:
        """Return the 1-tuple of outputs [B, ...] for timestep [B] and named inputs [B, ...].

        Each transformer gets only the rows of its own timesteps. On the meta device, where the
        timesteps have no values, the first transformer gets all rows. Raises ValueError if
        ``return_dict`` is set.
        """
        if return_dict:
            raise ValueError("models with two transformers must return a tuple")
        below = None if timestep.device.type == "meta" else self.below(timestep)
        if below is None or not bool(below.any()):
            return self.transformer(timestep=timestep, return_dict=False, **rows)
        if bool(below.all()):
            return self.transformer_2(timestep=timestep, return_dict=False, **rows)
        indices = [chosen.nonzero().flatten() for chosen in (~below, below)]
        parts: list[Tensor] = []
        for expert, index in zip((self.transformer, self.transformer_2), indices, strict=True):
            own = {name: tensor[index] for name, tensor in rows.items()}
            parts += expert(timestep=timestep[index], return_dict=False, **own)
        return (torch.cat(parts)[torch.cat(indices).argsort()],)

    def below(self, timestep: Tensor) -> Tensor:
        """Return a bool mask, shaped like ``timestep``, of the timesteps of the second expert."""
        return timestep < self.boundary

    def enable_gradient_checkpointing(self, **how: Any) -> None:
        """Enable gradient checkpointing in both transformers."""
        for expert in (self.transformer, self.transformer_2):
            expert.enable_gradient_checkpointing(**how)

    def disable_gradient_checkpointing(self) -> None:
        """Disable gradient checkpointing in both transformers."""
        for expert in (self.transformer, self.transformer_2):
            expert.disable_gradient_checkpointing()


def experts_of(denoiser: nn.Module) -> list[nn.Module]:
    """Return the transformers of a denoiser: a list of itself if it is a single one."""
    return list(denoiser.children()) if isinstance(denoiser, Experts) else [denoiser]
