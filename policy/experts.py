"""Transformers that are one denoiser: an expert for each range of noise levels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

EXPERTS = ("transformer", "transformer_2")
"""What a pipeline calls them: the one of high noise levels, the one of low ones."""


class Experts(nn.Module):
    """Two transformers of diffusers as one: the second for timesteps below ``boundary``.

    eDiff-I (arXiv 2211.01324) calls them experts, and so does Wan 2.2. Paths of modules begin with
    the names in ``EXPERTS``.
    """

    def __init__(self, high: nn.Module, low: nn.Module, boundary: float) -> None:
        super().__init__()
        self.transformer, self.transformer_2 = high, low
        self.boundary = boundary

    def forward(self, timestep: Tensor, **rows: Any) -> tuple[Tensor]:
        """What a transformer returns without ``return_dict`` for timestep [B] and ``rows`` [B, ...]
        by name: of each row its expert's, whose other rows are no part of that pass.

        Without data, on the meta device, all rows are the first expert's.
        """
        meta = timestep.device.type == "meta"
        below = torch.zeros(len(timestep), dtype=torch.bool) if meta else self.below(timestep).cpu()
        found: list[Tensor] = []
        places: list[Tensor] = []
        for expert, chosen in ((self.transformer, ~below), (self.transformer_2, below)):
            if not bool(chosen.any()):
                continue
            place = chosen.nonzero().flatten().to(timestep.device)
            given = {"timestep": timestep, **rows}
            if not bool(chosen.all()):
                given = {name: tensor[place] for name, tensor in given.items()}
            found.append(expert(**given, return_dict=False)[0])
            places.append(place)
        whole = found[0] if len(found) == 1 else torch.cat(found)[torch.cat(places).argsort()]
        return (whole,)

    def below(self, timestep: Tensor) -> Tensor:
        """Whether a timestep is the second expert's: bool in its shape."""
        return timestep < self.boundary

    def enable_gradient_checkpointing(self, **how: Any) -> None:
        """As of a transformer."""
        for expert in self.children():
            expert.enable_gradient_checkpointing(**how)  # pyright: ignore[reportCallIssue]

    def disable_gradient_checkpointing(self) -> None:
        """As of a transformer."""
        for expert in self.children():
            expert.disable_gradient_checkpointing()  # pyright: ignore[reportCallIssue]


def experts_of(denoiser: nn.Module) -> list[nn.Module]:
    """The transformers of a denoiser: itself, where it is one."""
    return list(denoiser.children()) if isinstance(denoiser, Experts) else [denoiser]
