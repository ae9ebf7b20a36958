"""What the policy's modules share: values that cross them, and names of dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from records.weights import DTYPES as DTYPES  # for those who import it from here

Velocity = Callable[[Tensor, Tensor], Tensor]
"""(x [B, *latent], sigma 0-dim or [B]) -> v [B, *latent] = eps - x0, where x_t = (1 - t) x0 + t eps
and sigma = t in [0, 1].
"""

NEGATIVE = "negative/"
"""Before the names of a negative prompt's tensors in a row of conditioning."""


@dataclass(frozen=True)
class Conditioning:
    """What the denoiser is told about B prompts: named float tensors, each [B, ...]."""

    tensors: dict[str, Tensor]

    def __post_init__(self) -> None:
        lengths = {name: len(tensor) for name, tensor in self.tensors.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"conditioning tensors need one common number of rows, got {lengths}")

    def __len__(self) -> int:
        """B, the number of prompts."""
        return len(next(iter(self.tensors.values())))

    def repeat(self, n: int) -> Conditioning:
        """Each prompt n times in a row: [B * n, ...]. One prompt is expanded without a copy."""
        if len(self) == 1:
            return self.each(lambda tensor: tensor.expand(n, *tensor.shape[1:]))
        return self.each(lambda tensor: tensor.repeat_interleave(n, dim=0))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Conditioning:
        """Moved and cast."""
        return self.each(lambda tensor: tensor.to(device=device, dtype=dtype))

    def rows(self, index: int | slice | Sequence[int] | Tensor) -> Conditioning:
        """Some of the prompts; an int gives one row, still with its batch dimension."""
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"row {index} of a conditioning with {len(self)} rows")
            index = [index]
        if not isinstance(index, slice):
            index = torch.as_tensor(index)
        return self.each(lambda tensor: tensor[index])

    def each(self, do: Callable[[Tensor], Tensor]) -> Conditioning:
        """What ``do`` makes of each of the tensors."""
        return Conditioning({name: do(tensor) for name, tensor in self.tensors.items()})

    def with_negative(self, negative: Conditioning) -> Conditioning:
        """Each row with that of its negative prompt beside it, of ``negative`` as many or one."""
        beside = (negative if len(negative) == len(self) else negative.repeat(len(self))).tensors
        return Conditioning(
            {**self.tensors, **{f"{NEGATIVE}{name}": tensor for name, tensor in beside.items()}}
        )

    def parted(self) -> tuple[Conditioning, Conditioning]:
        """(each row's prompt, its negative prompt). Raises ValueError where there is none."""
        against = {
            name.removeprefix(NEGATIVE): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(NEGATIVE)
        }
        if not against:
            raise ValueError("conditioning without a negative prompt: guidance needs one")
        along = {name: self.tensors[name] for name in against}
        return Conditioning(along), Conditioning(against)

    @staticmethod
    def cat(parts: Sequence[Conditioning]) -> Conditioning:
        """The rows of all parts, in order."""
        if not parts:
            raise ValueError("no conditioning to concatenate")
        return Conditioning(
            {name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors}
        )
