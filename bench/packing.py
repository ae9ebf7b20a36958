"""Count of kernels and bytes for packing activations and weights: ``python -m bench packing``.

Counts, unlike times, hold on any machine. In eager mode every operation is a separate kernel, which
reads its operands from memory and writes its result there; a packing kernel of
``policy.precision.kernels`` is one operation. Both are counted on the path that the layers use: the
eager one on a CPU, the kernels on tensors without data on a CUDA device, where nothing is launched.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs.section import Tree
from policy.precision import nvfp4
from policy.precision.fp8 import Activations
from policy.precision.history import AmaxHistory
from policy.precision.kernels import nvfp4_pack_weight, tensor_amax
from policy.precision.torch_nvfp4 import pack_operand

ROWS, COLUMNS = 1024, 3072
ONLY_WRITTEN = ("copy_", "fill_", "zero_")
"""In-place operations that do not read the tensor that they overwrite."""
HOW_TO_READ = (
    "once per input, for all products that read it, and weights once per version; bytes per element"
    " over a GPU's bandwidth is the least time that packing takes, to be compared with what a"
    " quicker product saves"
)


class Counting(TorchDispatchMode):
    """Dispatch mode that counts operations and memory traffic.

    ``operations`` are kernels, ``small`` those of them with single numbers only; ``read`` and
    ``written`` are bytes. Views and allocations are free; an expanded operand counts with its size
    in memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.small = self.read = self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        inputs, outputs = _tensors((args, kwargs or {})), _tensors(result)
        memory = {_memory(tensor) for tensor in inputs}
        # fake tensors do not reveal shared memory, but the schemas of operators declare it
        shares = any(value.alias_info is not None for value in func._schema.returns)
        shares = shares or any(_memory(tensor) in memory for tensor in outputs)
        is_view = not func._schema.is_mutable and shares
        if outputs and not is_view and not name.startswith(("empty", "new_empty")):
            unread = (
                {_memory(tensor) for tensor in _tensors(args[:1])}
                if name in ONLY_WRITTEN
                else set()
            )
            unread |= {_memory(tensor) for tensor in _tensors((kwargs or {}).get("out"))}
            self.operations += 1
            self.small += all(tensor.numel() <= 1 for tensor in inputs + outputs)
            self.read += sum(_bytes(tensor) for tensor in inputs if _memory(tensor) not in unread)
            self.written += sum(_bytes(tensor) for tensor in outputs)
            if name.startswith("sol_rl::nvfp4_tiles"):
                # every program reads all partial results again, and writes its own maximum
                programs, records = outputs[1].numel() // 512, name.endswith("recording")
                self.read += (programs - 1) * _bytes(inputs[1])
                self.written += 4 * programs if records else 0
                self.read -= _bytes(inputs[2]) if records else 0
        return result


def count(do: Callable[[], object]) -> Counting:
    """Return the counts of what ``do`` runs."""
    with Counting() as counting:
        do()
    return counting


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> int:
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride or not size else 1
    return elements * tensor.element_size()


# ---- the formats

Pack = Callable[[Tensor], object]
"""A function that packs activations [M, K] before the product."""


def by_previous_pass(device: torch.device) -> Pack:
    """Return the packing to NVFP4 by the amax of the pass before."""
    history = AmaxHistory(device)
    history.known = True
    return lambda x: pack_operand(x, False, history)


def weights(device: torch.device) -> Pack:
    """Return the packing of a weight to NVFP4, without the host's check of its amax."""
    if device.type == "cpu":
        return lambda x: nvfp4.quantize(x, search=True)
    return lambda x: nvfp4_pack_weight(x, tensor_amax(x), nvfp4.SEARCH_OFFSETS)


FORMATS: dict[str, Callable[[torch.device], Pack]] = {
    "fp8": lambda device: lambda x: Activations().quantized(x),
    "nvfp4": lambda device: lambda x: pack_operand(x, False),
    "nvfp4 previous_pass": by_previous_pass,
    "nvfp4 weights": weights,
}
"""By wire format, and by ``explore.activation_amax`` if that is not the default; and weights."""


def table() -> list[tuple[str, str, Counting]]:
    """Return (format, form, count) rows for bfloat16 [1024, 3072]; form is "eager" or "kernels"."""
    rows = []
    for name, made in FORMATS.items():
        x = torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16)
        rows.append((name, "eager", count(partial(made(x.device), x))))
        with FakeTensorMode():
            x = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device="cuda:0")
            rows.append((name, "kernels", count(partial(made(x.device), x))))
    return rows


def moved(counted: Counting) -> float:
    """Return the bytes read and written per element."""
    return (counted.read + counted.written) / (ROWS * COLUMNS)


def as_json() -> dict[str, Tree]:
    """Return the counts per format: with kernels (default on CUDA), and under "eager" without."""
    rows = {
        (name, form): {"kernels": counted.operations, "bytes_per_element": round(moved(counted), 4)}
        for name, form, counted in table()
    }
    return {name: {**rows[name, "kernels"], "eager": rows[name, "eager"]} for name in FORMATS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or JSON with ``--json``; return 0."""
    parser = argparse.ArgumentParser(prog="python -m bench packing", description=HOW_TO_READ)
    parser.add_argument("--json", action="store_true", help="print JSON")
    if parser.parse_args(arguments).json:
        print(json.dumps(as_json(), indent=1))
        return 0
    print(f"bfloat16 [{ROWS}, {COLUMNS}]; counted without a GPU, nothing is timed")
    print(f"{'':28}{'kernels':>9}{'on a number':>13}{'read/element':>14}{'written':>9}{'both':>8}")
    elements = ROWS * COLUMNS
    for name, form, counted in table():
        print(
            f"{name:20}{form:8}{counted.operations:9}{counted.small:13}"
            f"{counted.read / elements:14.2f}{counted.written / elements:9.2f}{moved(counted):8.2f}"
        )
    print(HOW_TO_READ)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
