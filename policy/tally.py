"""Counts what runs on the meta device: operations, and bytes at once, of passes without data.

Nothing of a model is known here; ``policy.memory`` says what is run.
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
    """Functions that count the operations of a call, by torch's operator."""
    # here: it brings triton's run time, which neither the driver nor an actor needs to start
    from torch.utils.flop_counter import flop_registry

    aten: Any = torch.ops.aten
    return {**flop_registry, aten.addmm_: flop_registry[aten.addmm]}


INTENSITY = 100
"""Operations for each byte below which a product waits for memory, not for tensor cores: depthwise
convolutions, products with a few rows. Large GPUs reach 150 to 300.
"""
HEAD = 128
"""Numbers of a head of attention at which tensor cores are not kept waiting by exponentials."""


class Tally(TorchDispatchMode):
    """While active, counts operations (products, convolutions, attention) and bytes of results, and
    what an eager GPU would do: kernels, and bytes that they move, but those of large products;
    ``small`` are those of small products.

    ``attention`` are the operations of attention, ``heads`` the same as if each number of a head
    had to wait as in heads of ``HEAD``: small heads take longer for an operation.

    ``converts``: convolutions hold their input and output a second time, as cuDNN does, which
    exchanges the order of their axes.
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
        # what was there before is known, at no size: an operation may return it, or a view of it
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._track(tensor, counts=False)
        if func is torch.ops.aten.add.Tensor and accumulates(*args[:2]):
            return args[0].add_(args[1])
        out = func(*args, **kwargs)
        convolves = self._converts and func._schema.name == "aten::convolution"
        if convolves and _channels_last(args[0]):  # stays so on a GPU, not on the meta device
            out = out.contiguous(memory_format=torch.channels_last)
        count = self._counts.get(func._overloadpacket)
        flops = 0 if count is None else count(*args, **kwargs, out_val=out)
        self.flops += flops
        self._move(func._schema, flops, (args, kwargs), out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._track(tensor, counts=True)
        if convolves:
            self.peak = max(self.peak, self.live + _converted(args[0], args[1], out))
        return out

    def _move(self, schema: Any, flops: int, given: Any, out: Any) -> None:
        """Count a kernel and what it moves; views and allocations are none."""
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        name = schema.name.removeprefix("aten::")
        view = not schema.is_mutable and any(value.alias_info for value in schema.returns)
        if not made or view or name.startswith(FREE) or _whole:
            return
        read = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        moved = sum(tensor.nbytes for tensor in (*read, *made))
        self.kernels += 1
        if "attention" in name:
            self.attention += flops
            self.heads += round(flops * math.sqrt(HEAD / read[0].shape[-1]))
        if flops < INTENSITY * moved:
            self.bytes += moved
            self.small += moved if flops else 0
        if name == "convolution" and given[0][2] is not None:  # its bias is added afterwards
            self.kernels += 1
            self.bytes += 2 * made[0].nbytes

    def normalized(self, given: Tensor) -> None:
        """A norm that GPUs have one kernel for."""
        self.kernels += 1
        self.bytes += 2 * given.nbytes

    def _track(self, tensor: Tensor, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if counts else 0

        def gone(_: object) -> None:
            self._known.pop(key, None)
            self.live -= size

        # an entry ends with its storage, as the next one may be at the same address
        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


def _channels_last(tensor: Tensor) -> bool:
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return last and not tensor.is_contiguous()


def _converted(given: Tensor, weight: Tensor, out: Tensor) -> int:
    """Bytes of a convolution's second copies: none of one that is a plain product, or depthwise, or
    whose input has its channels last already.
    """
    plain = math.prod(weight.shape[2:]) == 1 or weight.shape[1] == 1
    return 0 if plain or _channels_last(given) else given.nbytes + out.nbytes


_active: list[Tally] = []
_whole: list[None] = []
"""Not empty while operations run that are one kernel on a GPU, but several here."""
FREE = ("empty", "new_empty", "_unsafe_view")
"""Operators that move nothing, though they do not say that they are views."""


def accumulates(sum_: Any, gradient: Any) -> bool:
    """Whether a backward pass adds ``gradient`` to a sum that nothing else refers to. Autograd adds
    in place then, but not under a dispatch mode such as ``Tally``, which must do it itself.
    """
    both = isinstance(sum_, Tensor) and isinstance(gradient, Tensor)
    if not both or torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
        return False
    alone = torch._C._storage_Use_Count(sum_.untyped_storage()._cdata) <= OWNERS
    alike = sum_.shape == gradient.shape and sum_.dtype == gradient.dtype
    return alone and alike and is_non_overlapping_and_dense_or_false(sum_)


OWNERS = 2
"""References to the storage of a tensor that nothing else shares: the tensor, and the query."""


@contextmanager
def fused_attention() -> Iterator[None]:
    """Counts attention on the meta device as a fused kernel, without its scores in memory, and what
    torch's root mean square norm moves as that of one kernel.

    The function itself is exchanged: torch's own way of overriding it does not reach what a
    backward pass computes again.
    """
    functional: Any = nn.functional
    spelled_out = functional.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *rest: Any,
        **more: Any,
    ) -> Tensor:
        if query.device.type != "meta":
            return spelled_out(query, key, value, attn_mask, *rest, **more)
        scale = more.get("scale")
        # a mask changes neither the operations nor, being small, the memory
        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, False, False, scale=scale
        )[0]

    spelled_norm = functional.rms_norm

    def norm(given: Tensor, *rest: Any, **more: Any) -> Tensor:
        _whole.append(None)
        try:
            found = spelled_norm(given, *rest, **more)
        finally:
            _whole.pop()
        for tally in _active:
            tally.normalized(given)
        return found

    functional.scaled_dot_product_attention, functional.rms_norm = attention, norm
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = spelled_out
        functional.rms_norm = spelled_norm
