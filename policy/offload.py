"""Frozen weights that are on a device in their turn and in host memory between turns, to the bit.

Every tensor keeps its object, its shape and its strides; what is exchanged is the memory behind it.
So what holds the tensor (a module, a compiled block, a kernel's wrapper) sees it where it is now.
Addresses on the device are others after each return: a captured CUDA graph would read freed memory,
and nothing here captures any.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from policy.device import synchronise

ALIGNED = 256
"""Bytes at multiples of which tensors begin in host memory: whole elements of every type."""


def frozen_tensors(*modules: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers of modules, without those of adapters."""
    for module in modules:
        for name, parameter in module.named_parameters():
            if ".lora_" not in name:
                yield parameter
        yield from module.buffers()


class Offload:
    """Moves tensors between host memory, where they begin, and ``device``.

    Host memory is taken once, is page-locked where the device is a GPU, and is kept while they are
    on the device. Raises ValueError for a tensor whose elements share memory, RuntimeError where
    memory cannot be page-locked.
    """

    def __init__(self, tensors: Iterator[Tensor], device: torch.device) -> None:
        self._device = device
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._host = _room_for(self._tensors)
        self.away = True
        for tensor, room in zip(self._tensors, self._host, strict=True):
            room.copy_(tensor.detach())
            tensor.data = room  # one by one: twice the model may not fit the host
        if device.type == "cuda" and self._host:
            arena = self._host[0].untyped_storage()
            _page_lock(arena)
            weakref.finalize(self, _unlock, arena).atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes that each move takes."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def back(self) -> int:
        """Move to the device; returns the bytes that moved, 0 where all was there already."""
        if not self.away:
            return 0
        for tensor, room in zip(self._tensors, self._host, strict=True):
            here = torch.empty_strided(
                room.size(), room.stride(), dtype=room.dtype, device=self._device
            )
            tensor.data = here.copy_(room, non_blocking=True)
        synchronise(self._device)
        self.away = False
        return self.nbytes

    def out(self) -> int:
        """Move to host memory; returns the bytes that moved, 0 where all was there already."""
        if self.away:
            return 0
        for tensor, room in zip(self._tensors, self._host, strict=True):
            room.copy_(tensor.detach(), non_blocking=True)
        synchronise(self._device)
        for tensor, room in zip(self._tensors, self._host, strict=True):
            tensor.data = room
        self.away = True
        return self.nbytes


def release_cache(device: torch.device) -> None:
    """Give memory that torch's allocator keeps for later back to the GPU."""
    synchronise(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _room_for(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors like these in one piece of host memory: torch's own page-locked pieces are of powers
    of two, up to twice as large.
    """
    starts, total = list[int](), 0
    for tensor in tensors:
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot move"
                " to host memory: its elements share memory, or lie apart"
            )
        starts.append(total)
        total += math.ceil(tensor.nbytes / ALIGNED) * ALIGNED
    arena = torch.empty(total, dtype=torch.uint8)
    return [
        arena[start : start + tensor.nbytes]
        .view(tensor.dtype)
        .as_strided(tensor.size(), tensor.stride(), start // tensor.element_size())
        for start, tensor in zip(starts, tensors, strict=True)
    ]


def _page_lock(arena: torch.UntypedStorage) -> None:
    cuda: Any = torch.cuda.cudart()
    # copies from pageable memory go through a buffer of the driver's, and wait for it
    error = int(cuda.cudaHostRegister(arena.data_ptr(), arena.nbytes(), 0))
    if error:
        raise RuntimeError(
            f"{arena.nbytes() / 1e9:.1f} GB of host memory cannot be page-locked (CUDA error"
            f" {error}): give the node more memory, or set between_turns = 'stay'"
        )


def _unlock(arena: torch.UntypedStorage) -> None:
    cuda: Any = torch.cuda.cudart()
    cuda.cudaHostUnregister(arena.data_ptr())
