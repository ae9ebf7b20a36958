"""Types shared by the policy's modules, and dtypes by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from records.weights import DTYPES as DTYPES  # re-exported

Velocity = Callable[[Tensor, Tensor], Tensor]
"""Velocity function (x [B, *latent], sigma 0-dim or [B]) -> v [B, *latent].

v = eps - x0, where x_t = (1 - t) x0 + t eps and sigma = t in [0, 1].
"""

NEGATIVE = "negative/"
"""Prefix of the names of a negative prompt's tensors in conditioning."""


@dataclass(frozen=True)
class Conditioning:
    """The denoiser's inputs for B prompts: named float tensors, each [B, ...]."""

    tensors: dict[str, Tensor]

    def __post_init__(self) -> None:
        lengths = {name: len(tensor) for name, tensor in self.tensors.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(
                f"conditioning tensors must have the same number of rows, got {lengths}"
            )

    def __len__(self) -> int:
        """Return B, the number of prompts."""
        return len(next(iter(self.tensors.values())))

    def repeat(self, n: int) -> Conditioning:
        """Repeat each prompt n times consecutively: [B * n, ...].

        A single prompt is expanded without a copy.
        """
        if len(self) == 1:
            return self.map(lambda tensor: tensor.expand(n, *tensor.shape[1:]))
        return self.map(lambda tensor: tensor.repeat_interleave(n, dim=0))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Conditioning:
        """Return the conditioning moved to ``device`` and cast to ``dtype``."""
        return self.map(lambda tensor: tensor.to(device=device, dtype=dtype))

    def rows(self, index: int | slice | Sequence[int] | Tensor) -> Conditioning:
        """Return the selected prompts; an int selects one row and keeps the batch dimension."""
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"row {index} of a conditioning with {len(self)} rows")
            index = [index]
        if not isinstance(index, slice):
            index = torch.as_tensor(index)
        return self.map(lambda tensor: tensor[index])

    def map(self, do: Callable[[Tensor], Tensor]) -> Conditioning:
        """Return new conditioning with ``do`` applied to each tensor."""
        return Conditioning({name: do(tensor) for name, tensor in self.tensors.items()})

    def with_negative(self, negative: Conditioning) -> Conditioning:
        """Return the conditioning with the tensors of negative prompts added.

        ``negative`` has as many rows, or one row for all prompts.
        """
        added = (negative if len(negative) == len(self) else negative.repeat(len(self))).tensors
        return Conditioning(
            {**self.tensors, **{f"{NEGATIVE}{name}": tensor for name, tensor in added.items()}}
        )

    def split_negative(self) -> tuple[Conditioning, Conditioning]:
        """Split into (prompts, negative prompts); raise ValueError if the latter are missing."""
        negative = {
            name.removeprefix(NEGATIVE): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(NEGATIVE)
        }
        if not negative:
            raise ValueError("guidance needs conditioning with a negative prompt")
        positive = {name: self.tensors[name] for name in negative}
        return Conditioning(positive), Conditioning(negative)

    @staticmethod
    def cat(parts: Sequence[Conditioning]) -> Conditioning:
        """Concatenate the rows of all parts, in order; raise ValueError if there are none."""
        if not parts:
            raise ValueError("no conditioning to concatenate")
        return Conditioning(
            {name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors}
        )
