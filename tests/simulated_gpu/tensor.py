"""Tensors on the simulated GPU, and the operators on them."""

from __future__ import annotations

import functools
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")
BETWEEN_DEVICES = ("aten::copy_", "aten::_to_copy")
HOST_INDICES = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
"""Operators that take indices on the CPU."""
WAITING = (
    *("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero"),
    *("aten::masked_select", "aten::_unique2"),
)
"""Operators whose result the host waits for: a number, or a shape."""
waits: Counter[str] = Counter()
"""Number of times that the host would have waited for the GPU, by the line of code."""


@functools.cache
def substitutes() -> Mapping[str, Callable[..., Any]]:
    """Return what is run in the place of operators.

    It is imported with the first operator on a GPU: whatever imports torch first may be a part of
    the project that has not been imported to its end.
    """
    from tests.simulated_gpu.products import SUBSTITUTES

    return SUBSTITUTES


class GPUTensor(Tensor):
    """A tensor that says that it is on ``cuda:0``; ``host`` is a CPU tensor with its values."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> GPUTensor:
        """Return a tensor with the metadata of ``host`` on another device."""
        made = Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(),
            dtype=host.dtype, layout=host.layout, device="cuda:0",
        )  # fmt: skip
        made.host = host
        return made

    def __repr__(self, **_: Any) -> str:
        return f"GPUTensor({self.host!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("a tensor on the GPU is to be pickled")

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory of the values, which may be freed and allocated again."""
        return self.host.untyped_storage()

    def tolist(self) -> Any:
        """Return the values as a list, for which the host waits."""
        waits[line_of_caller()] += 1
        return self.host.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on the values."""
        return run_operator(func, args, kwargs or {})


def run_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the CPU values of its operands; its results are where a GPU has them.

    Raises RuntimeError if operands are on two devices.
    """
    name, returns, written = described(func)
    tensors = list(tensors_of((*args, *kwargs.values())))
    check_devices(name, tensors)
    on_gpu = result_on_gpu(name, tensors, kwargs.get("device"))
    count_wait(name, tensors, args, on_gpu)
    run = substitutes().get(name, func)
    hosts = {key: mapped(host_of, value) for key, value in kwargs.items()}
    result = run(*mapped(host_of, args), **hosts)
    check_shapes(name, tensors)
    if written:
        operands = [args[at] if at < len(args) else kwargs[key] for at, key in written]
        return operands[0] if returns == 1 else operands
    return mapped(moved, result) if on_gpu else result


@functools.cache
def described(func: Any) -> tuple[str, int, list[tuple[int, str]]]:
    """Return an operator's name, its number of results, and the operands that it writes and
    returns, each by position and name.
    """
    schema, written = func._schema, list[tuple[int, str]]()
    alias = schema.returns[0].alias_info if schema.returns else None
    if alias and alias.is_write:
        written = [
            (index, argument.name)
            for index, argument in enumerate(schema.arguments)
            if argument.alias_info and argument.alias_info.is_write
        ]
    return schema.name, len(schema.returns), written


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``function`` to a value, or to each of a list or tuple, as operators have them."""
    if isinstance(value, tuple | list):
        return type(value)([mapped(function, each) for each in value])
    return function(value)


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among the operands of an operator."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_of(value)


def host_of(value: Any) -> Any:
    """Return a tensor's values, the CPU for a device, and any other value unchanged."""
    if isinstance(value, torch.device):
        return CPU
    return value.host if isinstance(value, GPUTensor) else value


def moved(value: Any) -> Any:
    """Return a plain tensor as one on the GPU, and any other value unchanged."""
    if not isinstance(value, Tensor) or isinstance(value, GPUTensor):
        return value
    # such views would hide from torch that the values are still to be conjugated or negated
    return GPUTensor(value.resolve_conj().resolve_neg())


def check_devices(name: str, tensors: list[Tensor]) -> None:
    """Raise RuntimeError if an operator has operands on two devices; CPU scalars are allowed."""
    if name in BETWEEN_DEVICES:
        return
    operands = tensors[:1] if name in HOST_INDICES else tensors
    at = {each.device.type for each in operands if each.ndim}
    if len(at) > 1:
        shapes = [(each.device.type, tuple(each.shape)) for each in operands]
        raise RuntimeError(f"{name}: operands on two devices: {shapes}")


def result_on_gpu(name: str, tensors: list[Tensor], device: torch.device | None) -> bool:
    """Return True if an operator's result is on the GPU."""
    if name == "aten::copy_":
        return isinstance(tensors[0], GPUTensor)
    if device is not None:
        return device.type == "cuda"
    return any(isinstance(each, GPUTensor) for each in tensors)


def count_wait(name: str, tensors: list[Tensor], args: tuple[Any, ...], on_gpu: bool) -> None:
    """Count an operator for which the host waits."""
    if not any(isinstance(each, GPUTensor) for each in tensors):
        return
    by_mask = name in HOST_INDICES and any(
        isinstance(each, GPUTensor) and each.dtype == torch.bool for each in args[1]
    )
    leaves = name in BETWEEN_DEVICES and not on_gpu
    if name in WAITING or by_mask or leaves:
        waits[line_of_caller()] += 1


def line_of_caller() -> str:
    """Return the innermost line of this project's code that is being run, as ``file: code``."""
    for frame in reversed(traceback.extract_stack()):
        library = "site-packages" in frame.filename or "/lib/python" in frame.filename
        if not library and "simulated_gpu/tensor" not in frame.filename:
            return f"{frame.filename.rpartition('/')[2]}: {frame.line}"
    return "unknown"


def check_shapes(name: str, tensors: list[Tensor]) -> None:
    """Raise NotImplementedError if an operator resized an operand, which is not simulated."""
    for each in tensors:
        if isinstance(each, GPUTensor) and each.shape != each.host.shape:
            raise NotImplementedError(f"{name} resized an operand to {tuple(each.host.shape)}")


def factory(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that makes tensors on the GPU as ``make`` makes them on the CPU."""

    def made(*args: Any, device: Any = None, pin_memory: Any = None, **options: Any) -> Tensor:
        given = {key: value for key, value in options.items() if value is not None}
        return GPUTensor(make(*args, **given))

    return made
