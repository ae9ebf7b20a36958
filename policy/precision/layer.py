"""What the quantized layers of all backends have in common."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn


class QuantizedLinear(nn.Module):
    """A linear layer x [..., K] -> [..., N] for inference, whose weight arrives packed.

    ``bias`` stays unquantized. Published weights are copied into ``wire_targets`` in place, then
    ``arrived`` is called.
    """

    bias: Tensor | None
    float32_buffers: tuple[str, ...] = ()  # that stay so when the module is cast
    not_compiled: str | None = None  # why torch.compile must not be tried

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias

    def add_buffer(
        self, linear: nn.Linear, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """A buffer of zeros on the device of the linear's weight."""
        self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=linear.weight.device))

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Moves with the module; a cast does not reach the scales."""
        # `model.to(bfloat16)` would round the scales to 8 bits, and every weight with them
        kept = {name: getattr(self, name) for name in self.float32_buffers}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    def wire_targets(self) -> dict[str, Tensor]:
        """Tensors to fill, by the names that the backend's ``pack`` uses."""
        return dict(self.named_buffers())

    def arrived(self) -> None:
        """Bring the new weights in ``wire_targets`` into the form of the kernel, in place."""

    def shaped(self, y: Tensor, x: Tensor) -> Tensor:
        """Result rows y [rows, N] as the output for input x: x's dtype and leading shape."""
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)


class PointwiseConvolution(nn.Module):
    """A 1x1 convolution [B, K, H, W] -> [B, N, H, W], run by a linear layer over its pixels."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """The channels of every pixel through the linear layer."""
        return self.linear(x.movedim(1, -1)).movedim(-1, 1)


def capturing(x: Tensor) -> bool:
    """Whether what is done to x now is captured into a CUDA graph."""
    # tensors without data are on a CUDA device where CUDA may be missing
    return x.is_cuda and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


T = TypeVar("T")


class LastInput(Generic[T]):
    """Remembers the last input and what was made of it, for layers that get one input in turn.

    So to_q, to_k and to_v quantize their common input once. Not thread-safe. Tensors without a
    version counter (inference mode) and traced ones are not remembered: nobody could tell whether
    they have changed. Nor is anything while a CUDA graph is captured: a packing from before the
    capture would be no part of the graph, and its replays would multiply stale codes.
    """

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], int, T] | None = None

    def once(self, x: Tensor, make: Callable[[Tensor], T]) -> T:
        """``make(x)``, or its result of last time when that was for this very x, unchanged."""
        if torch.compiler.is_compiling() or x.is_inference() or capturing(x):
            self._last = None
            return make(x)
        if self._last is not None:
            reference, version, result = self._last
            if reference() is x and x._version == version:
                return result
            del result
        self._last = None  # frees its memory before `make` needs as much again
        result = make(x)
        # weakly, to keep no activation alive; the version rises with every write into x
        self._last = (weakref.ref(x), x._version, result)
        return result


def rows_of(x: Tensor) -> Tensor:
    """x [..., K] as [rows, K]."""
    return x.detach().reshape(-1, x.shape[-1])


def padded_rows(rows: Tensor, multiple: int = 16) -> Tensor:
    """rows [M, K] with zero rows after them, up to a multiple; the same tensor if it is one."""
    missing = -len(rows) % multiple
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def swizzled(scales: Tensor) -> Tensor:
    """Block scales [N, C] of any one-byte type, flat, in the order that cuBLAS reads them.

    The result has ceil(N/128) 128 * ceil(C/4) 4 elements. Zero-padded to tiles of 128 x 4; within a
    tile row r = 32 a + b and column c lie at byte 16 b + 4 a + c; tiles follow each other along the
    columns first (cuBLAS documentation, "1D block scaling factors layout").
    """
    n, c = scales.shape
    padded = scales.new_zeros(-(-n // 128) * 128, -(-c // 4) * 4)
    padded[:n, :c] = scales
    return (
        padded.view(len(padded) // 128, 4, 32, padded.shape[1] // 4, 4)
        .permute(0, 3, 2, 1, 4)
        .reshape(-1)
    )
