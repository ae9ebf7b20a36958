"""Offloading of frozen weights to host memory between turns on the device, bit-exact.

Every tensor keeps its object, shape and strides; only its storage is exchanged. A module, a
compiled block or a kernel wrapper that refers to the tensor therefore sees its current location.
On a CPU it keeps its alignment too: the product of one row with a weight rounds otherwise in
memory that is aligned otherwise, and weights in a safetensors file are aligned to 8 bytes only.
Device addresses change with each move, so a captured CUDA graph would read freed memory; no CUDA
graphs are captured here.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from policy.device import synchronize

ALIGNED = 256
"""Alignment in bytes of tensors in host memory, a multiple of the element size of every dtype."""
VECTOR = 64
"""Bytes of the widest vector registers of a CPU. Alignment matters up to this."""


def frozen_tensors(*modules: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of the modules, except parameters of adapters."""
    for module in modules:
        for name, parameter in module.named_parameters():
            if ".lora_" not in name:
                yield parameter
        yield from module.buffers()


class Offload:
    """Moves tensors between host memory, where they start, and ``device``.

    Host memory is allocated once, page-locked if the device is a GPU, and kept while the tensors
    are on the device. Raises ValueError for a tensor whose elements overlap or have gaps, and
    RuntimeError if the memory cannot be page-locked.
    """

    def __init__(self, tensors: Iterator[Tensor], device: torch.device) -> None:
        self._device = device
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        offsets = [_offset(tensor, device) for tensor in self._tensors]
        self._host = _host_buffers_for(self._tensors, offsets)
        self.away = True
        for tensor, buffer in zip(self._tensors, self._host, strict=True):
            buffer.copy_(tensor.detach())
            tensor.data = buffer  # one by one: the host may lack room for two
        if device.type == "cuda" and self._host:
            arena = self._host[0].untyped_storage()
            _page_lock(arena)
            weakref.finalize(self, _page_unlock, arena).atexit = False

    @property
    def nbytes(self) -> int:
        """Number of bytes that each move transfers."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def to_device(self) -> int:
        """Move the tensors to the device; return the bytes moved, 0 if they were there already."""
        if not self.away:
            return 0
        for tensor, buffer in zip(self._tensors, self._host, strict=True):
            offset = _offset(buffer, self._device)
            arena = torch.empty(buffer.nbytes + offset, dtype=torch.uint8, device=self._device)
            tensor.data = _view(arena, offset, buffer).copy_(buffer, non_blocking=True)
        synchronize(self._device)
        self.away = False
        return self.nbytes

    def to_host(self) -> int:
        """Move the tensors to host memory; return the bytes moved, 0 if they were there already."""
        if self.away:
            return 0
        for tensor, buffer in zip(self._tensors, self._host, strict=True):
            buffer.copy_(tensor.detach(), non_blocking=True)
        synchronize(self._device)
        for tensor, buffer in zip(self._tensors, self._host, strict=True):
            tensor.data = buffer
        self.away = True
        return self.nbytes


def release_cache(device: torch.device) -> None:
    """Return cached, unused memory of torch's allocator to the GPU."""
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _offset(tensor: Tensor, device: torch.device) -> int:
    """Return how many bytes a tensor starts behind a multiple of ``VECTOR``.

    It is 0 on a GPU, which computes with copies that are aligned.
    """
    offset = tensor.data_ptr() % VECTOR if device.type == "cpu" else 0
    return offset if offset % tensor.element_size() == 0 else 0


def _host_buffers_for(tensors: Sequence[Tensor], offsets: Sequence[int]) -> list[Tensor]:
    """Allocate tensors of the same layout in one block of host memory.

    Each starts ``offset`` bytes behind a multiple of ``ALIGNED``. torch rounds its own page-locked
    allocations up to powers of two, at most twice the size.

    Raises ValueError for a tensor whose elements overlap or have gaps.
    """
    starts, total = list[int](), 0
    for tensor, offset in zip(tensors, offsets, strict=True):
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot"
                " move to host memory: its elements overlap or are not contiguous"
            )
        starts.append(total + offset)
        total += math.ceil((offset + tensor.nbytes) / ALIGNED) * ALIGNED
    arena = torch.empty(total, dtype=torch.uint8)
    return [_view(arena, start, tensor) for start, tensor in zip(starts, tensors, strict=True)]


def _view(arena: Tensor, start: int, tensor: Tensor) -> Tensor:
    """Return the bytes of ``arena`` from ``start`` as a tensor with the layout of ``tensor``."""
    return (
        arena[start : start + tensor.nbytes]
        .view(tensor.dtype)
        .as_strided(tensor.size(), tensor.stride(), start // tensor.element_size())
    )


def _page_lock(arena: torch.UntypedStorage) -> None:
    cuda: Any = torch.cuda.cudart()
    # copies from pageable memory go through a staging buffer of the driver and are synchronous
    error = int(cuda.cudaHostRegister(arena.data_ptr(), arena.nbytes(), 0))
    if error:
        raise RuntimeError(
            f"{arena.nbytes() / 1e9:.1f} GB of host memory cannot be page-locked (CUDA error"
            f" {error}): give the node more memory, or set between_turns = 'stay'"
        )


def _page_unlock(arena: torch.UntypedStorage) -> None:
    cuda: Any = torch.cuda.cudart()
    cuda.cudaHostUnregister(arena.data_ptr())
