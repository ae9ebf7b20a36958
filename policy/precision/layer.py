"""Base class and helpers of the quantized layers of all backends."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn


class QuantizedLinear(nn.Module):
    """A linear layer x [..., K] -> [..., N] for inference, whose weight is loaded in packed form.

    ``bias`` stays unquantized. To load published weights, copy them into ``wire_targets`` in place
    and then call ``finish_loading``.
    """

    bias: Tensor | None
    float32_buffers: tuple[str, ...] = ()  # stay float32 when the module is cast
    not_compiled: str | None = None  # the reason if it cannot be compiled

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias

    def add_buffer(
        self, linear: nn.Linear, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """Register a buffer of zeros on the device of the linear's weight."""
        self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=linear.weight.device))

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Apply ``fn``, such as a move or a cast, but keep the scales in float32."""
        # `model.to(bfloat16)` would round the scales, and with them every weight, to 8 bits
        kept = {name: getattr(self, name) for name in self.float32_buffers}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    def wire_targets(self) -> dict[str, Tensor]:
        """Return the tensors to fill, by the names that the backend's ``pack`` uses."""
        return dict(self.named_buffers(recurse=False))

    def finish_loading(self) -> None:
        """Convert newly loaded weights in ``wire_targets`` to the kernel's layout, in place."""

    def shaped(self, y: Tensor, x: Tensor) -> Tensor:
        """Return result rows y [rows, N] in the dtype and leading shape of input x."""
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)


class PointwiseConvolution(nn.Module):
    """A 1x1 convolution [B, K, H, W] -> [B, N, H, W], computed by a linear layer per pixel."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """Apply the linear layer to the channels of every pixel."""
        return self.linear(x.movedim(1, -1)).movedim(-1, 1)


def capturing(x: Tensor) -> bool:
    """Return True if operations on x are being captured into a CUDA graph."""
    # tensors without data may be on a CUDA device even if CUDA is missing
    return x.is_cuda and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


T = TypeVar("T")


class LastInput(Generic[T]):
    """Cache of the result for the last input, for consecutive layers that read the same input.

    It lets to_q, to_k and to_v quantize their common input once. Not thread-safe. Tensors without a
    version counter (inference mode) and traced tensors are not cached, because changes of them
    could not be detected. Nothing is cached while a CUDA graph is captured: a result from before
    the capture would not be part of the graph, and replays would multiply stale codes.
    """

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], int, T] | None = None

    def get_or_compute(self, x: Tensor, make: Callable[[Tensor], T]) -> T:
        """Return ``make(x)``, or the cached result if x is the last input, unchanged."""
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
        # a weak reference keeps no activation alive; the version changes with every write to x
        self._last = (weakref.ref(x), x._version, result)
        return result


def flatten_rows(x: Tensor) -> Tensor:
    """Return x [..., K] reshaped to [rows, K], detached."""
    return x.detach().reshape(-1, x.shape[-1])


def padded_rows(rows: Tensor, multiple: int = 16) -> Tensor:
    """Append zero rows to [M, K] up to a multiple; return the same tensor if M is one."""
    missing = -len(rows) % multiple
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def swizzled(scales: Tensor) -> Tensor:
    """Return block scales [N, C] of any one-byte dtype, flattened in cuBLAS's order.

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
