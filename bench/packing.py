"""What packing an activation costs where nothing is compiled: ``python -m bench.packing`` counts
operations and bytes.

Counts, not times, so they hold on any machine: eagerly every operation is a kernel of its own,
which reads its operands from memory and writes its result there. Run on a CPU; the formats whose
activations a vendor's library packs are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from policy.precision.fp8 import quantise_rows, row_scales
from policy.precision.layer import swizzled
from policy.precision.nvfp4 import pack_activation

ROWS, COLUMNS = 1024, 3072
ONLY_WRITTEN = ("copy_", "fill_", "zero_")
"""Operations in place that do not read what they overwrite."""
HOW_TO_READ = (
    "eagerly each operation is a kernel; bytes per element over a GPU's bandwidth is the least time"
    " that packing takes, to be held against what a quicker product saves; the last column is what"
    " a single kernel would move"
)


@dataclass(frozen=True)
class Count:
    """Kernels of a function, those of them that see single numbers only, and the bytes that all
    read and write.
    """

    operations: int
    small: int
    read: int
    written: int


class Counting(TorchDispatchMode):
    """Counts what runs inside. Views and allocations are free; an operand that is expanded is read
    at the size that it has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.small = self.read = self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and count it."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        given, made = _tensors((args, kwargs or {})), _tensors(result)
        memory = {_memory(tensor) for tensor in given}
        is_view = not func._schema.is_mutable and any(_memory(tensor) in memory for tensor in made)
        if not is_view and not name.startswith(("empty", "new_empty")):
            unread = (
                {_memory(tensor) for tensor in _tensors(args[:1])}
                if name in ONLY_WRITTEN
                else set()
            )
            unread |= {_memory(tensor) for tensor in _tensors((kwargs or {}).get("out"))}
            self.operations += 1
            self.small += all(tensor.numel() <= 1 for tensor in given + made)
            self.read += sum(_bytes(tensor) for tensor in given if _memory(tensor) not in unread)
            self.written += sum(_bytes(tensor) for tensor in made)
        return result


def count(do: Callable[[], object]) -> Count:
    """What ``do`` runs."""
    with Counting() as counting:
        do()
    return Count(counting.operations, counting.small, counting.read, counting.written)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> int:
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride or not size else 1
    return elements * tensor.element_size()


# ---- the formats


def fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales as ``fp8`` makes them of x [M, K], once for all layers that read it."""
    scales = row_scales(x)
    return quantise_rows(x, scales), scales


def formats() -> dict[str, tuple[Callable[[Tensor], object], float]]:
    """By name: what is done to bfloat16 activations [M, K], and the bytes per element that one
    kernel would read and write.
    """
    return {
        "fp8, once per input": (fp8, 2 + 1),
        "torch_nvfp4, once per input": (pack_activation, 2 + 4.5 / 8),
        "torch_nvfp4, scales in cuBLAS's order, per product": (
            lambda x: swizzled(_scales(x)),
            2 / 16,
        ),
    }


def _scales(x: Tensor) -> Tensor:
    return torch.empty(len(x), x.shape[1] // 16, dtype=torch.uint8)


def table() -> list[tuple[str, Count, float, float]]:
    """Per format (what, count, bytes moved per element, those of one kernel) of bfloat16 [1024,
    3072].
    """
    x = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    found = []
    for name, (do, least) in formats().items():
        counted = count(lambda do=do: do(x))
        found.append((name, counted, (counted.read + counted.written) / x.numel(), least))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 0."""
    print(
        f"activations bfloat16 [{ROWS}, {COLUMNS}], bytes per element of them; counted on a CPU,"
        " nothing is timed"
    )
    print(
        f"{'format':52}{'operations':>11}{'on one number':>15}"
        f"{'read':>8}{'written':>9}{'both':>8}{'one kernel':>12}"
    )
    elements = ROWS * COLUMNS
    for name, counted, moved, least in table():
        read, written = counted.read / elements, counted.written / elements
        print(
            f"{name:52}{counted.operations:11}{counted.small:15}{read:8.1f}{written:9.1f}{moved:8.1f}{least:12.2f}"
        )
    print(HOW_TO_READ)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
