"""Transformers that are one denoiser: an expert for each range of noise levels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

EXPERTS = ("transformer", "transformer_2")
"""What a pipeline calls them: the one of high noise levels, the one of low ones."""


class Experts(nn.Module):
    """Two transformers of diffusers as one: the second for timesteps below ``boundary``.

    Experts, as eDiff-I (arXiv 2211.01324) calls them. Paths of modules begin with
    the names in ``EXPERTS``.
    """

    transformer: Any  # of diffusers, as the other
    transformer_2: Any

    def __init__(self, high: nn.Module, low: nn.Module, boundary: float) -> None:
        super().__init__()
        self.transformer, self.transformer_2 = high, low
        self.boundary = boundary

    def forward(
        self, timestep: Tensor, *, return_dict: bool = False, **rows: Tensor
    ) -> tuple[Tensor]:
        """(of each row what its transformer makes of it,) for timestep [B] and ``rows`` [B, ...] by
        name. A transformer sees its own rows alone.

        Without data, on the meta device, all rows are the first one's. Raises ValueError for
        ``return_dict``.
        """
        if return_dict:
            raise ValueError("two transformers return a tuple")
        below = None if timestep.device.type == "meta" else self.below(timestep)
        if below is None or not bool(below.any()):
            return self.transformer(timestep=timestep, return_dict=False, **rows)
        if bool(below.all()):
            return self.transformer_2(timestep=timestep, return_dict=False, **rows)
        places = [chosen.nonzero().flatten() for chosen in (~below, below)]
        parts: list[Tensor] = []
        for expert, place in zip((self.transformer, self.transformer_2), places, strict=True):
            own = {name: tensor[place] for name, tensor in rows.items()}
            parts += expert(timestep=timestep[place], return_dict=False, **own)
        return (torch.cat(parts)[torch.cat(places).argsort()],)

    def below(self, timestep: Tensor) -> Tensor:
        """Whether a timestep is the second expert's: bool in its shape."""
        return timestep < self.boundary

    def enable_gradient_checkpointing(self, **how: Any) -> None:
        """As of a transformer."""
        for expert in (self.transformer, self.transformer_2):
            expert.enable_gradient_checkpointing(**how)

    def disable_gradient_checkpointing(self) -> None:
        """As of a transformer."""
        for expert in (self.transformer, self.transformer_2):
            expert.disable_gradient_checkpointing()


def experts_of(denoiser: nn.Module) -> list[nn.Module]:
    """The transformers of a denoiser: itself, where it is one."""
    return list(denoiser.children()) if isinstance(denoiser, Experts) else [denoiser]
