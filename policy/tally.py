"""Counts what runs on the meta device: operations, and bytes at once, of passes without data.

Nothing of a model is known here; ``policy.memory`` says what is run.
"""

from __future__ import annotations

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


class Tally(TorchDispatchMode):
    """While active, counts operations (products, convolutions, attention) and bytes of results."""

    def __init__(self) -> None:
        super().__init__()
        self._counts = flop_counts()
        self.flops = self.live = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._track(tensor, counts=False)
        if func is torch.ops.aten.add.Tensor and accumulates(*args[:2]):
            return args[0].add_(args[1])
        out = func(*args, **kwargs)
        count = self._counts.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._track(tensor, counts=True)
        return out

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
    """Counts attention on the meta device as a fused kernel, without its scores in memory.

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

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = spelled_out
