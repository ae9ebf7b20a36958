"""Counter of operations, kernels and memory of passes on the meta device, without data.

This module knows nothing about models; ``policy.pass_cost`` selects what runs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def flop_counts() -> dict[Any, Any]:
    """Return the functions that count the operations of a call, by torch operator."""
    # imported here: it loads the Triton runtime, which neither driver nor actors need to start
    from torch.utils.flop_counter import flop_registry

    aten: Any = torch.ops.aten
    return {**flop_registry, aten.addmm_: flop_registry[aten.addmm]}


INTENSITY = 100
"""Operations per byte below which a product is bound by memory instead of tensor cores.

Such are depthwise convolutions and products with few rows. Large GPUs reach 150 to 300.
"""
HEAD = 128
"""Size of an attention head from which tensor cores do not wait for exponentials."""


class Tally(TorchDispatchMode):
    """Dispatch mode that counts the cost of all operations while it is active.

    ``flops`` counts the operations of products, convolutions and attention; ``live`` and ``peak``
    count the bytes of results. ``kernels`` and ``bytes`` are what a GPU would run and move in eager
    mode, without the bytes of large products; ``small`` is the part of ``bytes`` that belongs to
    small products.

    ``attention`` counts the operations of attention. ``heads`` scales them to heads of size
    ``HEAD`` that take the same time, because small heads take longer per operation.

    With ``converts`` a convolution holds its input and output a second time, as with cuDNN, which
    permutes their axes.
    """

    def __init__(self, converts: bool = False) -> None:
        super().__init__()
        self._converts = converts
        self._counts = flop_counts()
        self.flops = self.live = self.peak = 0
        self.attention = self.heads = self.kernels = self.bytes = self.small = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __enter__(self) -> Tally:
        _active.append(self)
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        _active.remove(self)
        super().__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # inputs are tracked with size 0: an operation may return one, or a view of it
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._track(tensor, counts=False)
        if func is torch.ops.aten.add.Tensor and accumulates(*args[:2]):
            return args[0].add_(args[1])
        out = func(*args, **kwargs)
        convolves = self._converts and func._schema.name == "aten::convolution"
        # a GPU keeps this layout, the meta device does not
        if convolves and _channels_last(args[0]):
            out = out.contiguous(memory_format=torch.channels_last)
        count = self._counts.get(func._overloadpacket)
        flops = 0 if count is None else count(*args, **kwargs, out_val=out)
        self.flops += flops
        self._move(func._schema, flops, (args, kwargs), out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._track(tensor, counts=True)
        if convolves:
            self.peak = max(self.peak, self.live + _converted_bytes(args[0], args[1], out))
        return out

    def _move(self, schema: Any, flops: int, inputs: Any, out: Any) -> None:
        """Count a kernel and the bytes it moves; ignore views and allocations."""
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        name = schema.name.removeprefix("aten::")
        view = not schema.is_mutable and any(value.alias_info for value in schema.returns)
        if not outputs or view or name.startswith(FREE) or _single_kernel:
            return
        read = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        moved = sum(tensor.nbytes for tensor in (*read, *outputs))
        self.kernels += 1
        if "attention" in name:
            self.attention += flops
            self.heads += round(flops * math.sqrt(HEAD / read[0].shape[-1]))
        if flops < INTENSITY * moved:
            self.bytes += moved
            self.small += moved if flops else 0
        if name == "convolution" and inputs[0][2] is not None:  # its bias is added afterwards
            self.kernels += 1
            self.bytes += 2 * outputs[0].nbytes

    def normalized(self, x: Tensor) -> None:
        """Count a normalization that is a single kernel on a GPU."""
        self.kernels += 1
        self.bytes += 2 * x.nbytes

    def _track(self, tensor: Tensor, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if counts else 0

        def forget(_: object) -> None:
            self._known.pop(key, None)
            self.live -= size

        # the entry is removed with its storage, because the address may be reused
        self._known[key] = weakref.ref(storage, forget)
        self.live += size
        self.peak = max(self.peak, self.live)


def _channels_last(tensor: Tensor) -> bool:
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return last and not tensor.is_contiguous()


def _converted_bytes(x: Tensor, weight: Tensor, out: Tensor) -> int:
    """Return the bytes of the converted copies of a convolution's input and output.

    There are none if it is a plain product (1x1), depthwise, or if its input is already
    channels-last.
    """
    plain = math.prod(weight.shape[2:]) == 1 or weight.shape[1] == 1
    return 0 if plain or _channels_last(x) else x.nbytes + out.nbytes


_active: list[Tally] = []
_single_kernel: list[None] = []
"""Not empty while operations run that are one kernel on a GPU but several on the meta device."""
FREE = ("empty", "new_empty", "_unsafe_view")
"""Operators that move no data although their schema does not mark them as views."""


def accumulates(sum_: Any, gradient: Any) -> bool:
    """Return True if a backward pass adds ``gradient`` to a sum that nothing else references.

    Autograd then adds in place, but not under a dispatch mode such as ``Tally``, which therefore
    must do so itself.
    """
    both = isinstance(sum_, Tensor) and isinstance(gradient, Tensor)
    if not both or torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
        return False
    alone = torch._C._storage_Use_Count(sum_.untyped_storage()._cdata) <= OWNERS
    alike = sum_.shape == gradient.shape and sum_.dtype == gradient.dtype
    return alone and alike and is_non_overlapping_and_dense_or_false(sum_)


OWNERS = 2
"""Reference count of an unshared tensor's storage: one by the tensor and one by the query."""


@contextmanager
def fused_attention() -> Iterator[None]:
    """Count attention and RMSNorm on the meta device as one fused kernel each within the context.

    Fused attention has no attention scores in memory. The functions themselves are replaced,
    because torch's override mechanism does not reach what a backward pass recomputes.
    """
    functional: Any = nn.functional
    original_attention = functional.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if query.device.type != "meta":
            return original_attention(query, key, value, attn_mask, *args, **kwargs)
        scale = kwargs.get("scale")
        # a mask changes neither the operations nor, being small, the memory
        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, False, False, scale=scale
        )[0]

    original_norm = functional.rms_norm

    def norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        _single_kernel.append(None)
        try:
            result = original_norm(input, *args, **kwargs)
        finally:
            _single_kernel.pop()
        for tally in _active:
            tally.normalized(input)
        return result

    functional.scaled_dot_product_attention, functional.rms_norm = attention, norm
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original_attention
        functional.rms_norm = original_norm
