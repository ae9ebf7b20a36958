"""Count equal work on the meta device once: slices of a batch, and blocks of a denoiser."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from policy.sharding import blocks_of
from policy.tally import Tally

SUMS = ("flops", "attention", "heads", "kernels", "bytes", "small")


class LayerCall(NamedTuple):
    """One call of a linear or convolution: module path, operations, and elements of its input."""

    name: str
    flops: int
    elements: int


class Leaf(NamedTuple):
    """Form of a tensor in a result: a view of an input, or of a storage that the call created."""

    source: int  # index of the input or of the storage
    new: bool  # whether it is a storage
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Counted:
    """What a call counted, and the form of its result."""

    sums: dict[str, int]
    peak: int  # bytes, above what was live before the call
    storages: list[int]  # bytes of each that the result keeps
    leaves: list[object]  # ``Leaf`` of tensors, other values as they are
    tree: TreeSpec


class CountedOnce:
    """A function of meta tensors, of which only the first of the calls with equal inputs is run.

    The others add what the first one counted. For functions that keep nothing but their result,
    such as the decoder of images that are decoded one after the other. Functions with equal ``of``
    and the same ``known`` count as one function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        tally: Tally,
        known: dict[object, _Counted] | None = None,
        of: object = None,
    ) -> None:
        self._function, self._tally, self._of = function, tally, of
        self._known = {} if known is None else known

    def key(self, *args: Any, **kwargs: Any) -> object:
        """Return what the counts of a call depend on."""
        leaves, tree = tree_flatten((args, kwargs))
        return (self._of, repr(tree), *map(_form, leaves))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result, a tree of tensors."""
        key, tally = self.key(*args, **kwargs), self._tally
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if key not in self._known:
            result, self._known[key] = self._run(inputs, args, kwargs)
            return result
        first = self._known[key]
        for name, count in first.sums.items():
            setattr(tally, name, getattr(tally, name) + count)
        tally.peak = max(tally.peak, tally.live + first.peak)
        storages = [torch.empty(size, dtype=torch.uint8, device="meta") for size in first.storages]
        leaves = [
            _view((storages if leaf.new else inputs)[leaf.source], leaf)
            if isinstance(leaf, Leaf)
            else leaf
            for leaf in first.leaves
        ]
        return tree_unflatten(leaves, first.tree)

    def _run(self, inputs: Sequence[Tensor], args: Any, kwargs: Any) -> tuple[Any, _Counted]:
        tally = self._tally
        before, peak, live = _sums(tally), tally.peak, tally.live
        tally.peak = live
        result = self._function(*args, **kwargs)
        leaves, tree = tree_flatten(result)
        sums = {name: count - before[name] for name, count in _sums(tally).items()}
        given = {tensor.untyped_storage()._cdata: index for index, tensor in enumerate(inputs)}
        created: dict[int, int] = {}
        forms, sizes = [], []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                forms.append(leaf)
                continue
            storage = leaf.untyped_storage()
            new = storage._cdata not in given
            if new and storage._cdata not in created:
                created[storage._cdata] = len(sizes)
                sizes.append(storage.nbytes())
            source = (created if new else given)[storage._cdata]
            form = (leaf.shape, leaf.stride(), int(leaf.storage_offset()), leaf.dtype)
            forms.append(Leaf(source, new, *form))
        counted = _Counted(sums, tally.peak - live, sizes, forms, tree)
        tally.peak = max(peak, tally.peak)
        return result, counted


def _form(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return leaf if isinstance(leaf, int | float | str | None) else id(leaf)


def _view(source: Tensor, leaf: Leaf) -> Tensor:
    whole = source.view(leaf.dtype) if source.dtype != leaf.dtype else source
    return whole.as_strided(leaf.shape, leaf.strides, leaf.offset)


def _sums(tally: Tally) -> dict[str, int]:
    return {name: getattr(tally, name) for name in SUMS}


@contextmanager
def equal_blocks_once(
    transformer: nn.Module, names: Sequence[str], calls: list[LayerCall], tally: Tally
) -> Iterator[None]:
    """Within the context, run only the first of equal blocks, without gradients.

    The calls of its layers, of those in ``names``, are appended to ``calls`` for the others too.
    """
    paths = {id(module): f"{path}." for path, module in transformer.named_modules()}
    known: dict[object, _Counted] = {}
    called: dict[object, list[LayerCall]] = {}
    blocks: list[Any] = list(blocks_of(transformer))
    for block in blocks:
        path = paths[id(block)]
        layers = tuple(name.removeprefix(path) for name in names if name.startswith(path))
        shapes = tuple((name, each.shape, each.dtype) for name, each in block.named_parameters())
        of = (type(block), repr(block), shapes, layers)
        block.forward = _recorded(path, CountedOnce(block.forward, tally, known, of), called, calls)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward  # the class has it


def _recorded(
    path: str, counted: CountedOnce, called: dict[object, list[LayerCall]], calls: list[LayerCall]
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        key, before = counted.key(*args, **kwargs), len(calls)
        result = counted(*args, **kwargs)
        if key in called:
            calls.extend(call._replace(name=path + call.name) for call in called[key])
        else:
            called[key] = [
                call._replace(name=call.name.removeprefix(path)) for call in calls[before:]
            ]
        return result

    return run
