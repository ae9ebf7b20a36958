"""Which modules of a transformer run quantized, and putting quantized layers in their place."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import cast

from torch import nn

from policy.families.base import Family
from policy.precision.backends import Backend
from policy.precision.fused import FusedMember, join
from policy.precision.layer import PointwiseConvolution, QuantizedLinear

SMALL = re.compile(r"dim<(\d+)")
"""The pattern for layers with a small dimension."""


@dataclass(frozen=True)
class ModuleRow:
    """One row of the table that a run writes: a module with a weight matrix, quantized or not.

    ``fused``: the first of the linears that run as one product with it, all of which read the same
    input.
    """

    name: str
    shape: tuple[int, ...]
    quantized: bool
    why: str
    fused: str | None = None


def weight_modules(transformer: nn.Module) -> Iterator[tuple[str, nn.Linear | nn.Conv2d]]:
    """(module path, linear or convolution) in the transformer's order; adapters are not listed."""
    for name, module in transformer.named_modules():
        # the weight under an adapter is found by way of the module that wraps it, once
        if any(part == "base_layer" or part.startswith("lora_") for part in name.split(".")):
            continue
        owner = getattr(module, "base_layer", module)
        if isinstance(owner, nn.Linear | nn.Conv2d):
            yield name, owner


def quantize_plan(
    transformer: nn.Module,
    family: Family,
    modules_to_not_convert: Sequence[str] = (),
    backend: Backend | None = None,
) -> list[ModuleRow]:
    """A row for every module with a weight matrix of a bare or adapted transformer.

    ``modules_to_not_convert`` are further fnmatch patterns, beyond the family's; the last that
    matches decides, and ``!PATTERN`` takes back. ``dim<N`` is a layer with fewer rows or columns
    than N. Raises ValueError for a pattern that matches nothing.
    """
    modules = list(weight_modules(transformer))
    for pattern in modules_to_not_convert:
        if not any(_matches(name, module, pattern.removeprefix("!")) for name, module in modules):
            raise ValueError(
                f"explore.modules_to_not_convert: {pattern!r} matches no module; there are such as"
                f" {modules[-1][0]!r}"
            )
    rows = [
        _row(name, module, family.modules_to_not_convert, modules_to_not_convert, backend)
        for name, module in modules
    ]
    first = _fused(rows, family.fuse) if backend is not None and backend.fuses else {}
    return [replace(row, fused=first.get(row.name)) for row in rows]


def changing_modules(plan: Sequence[ModuleRow], adapted: Container[str]) -> list[str]:
    """The modules whose packed weights may differ from version to version: adapted ones, and those
    that run as one product with an adapted one, as they share its range.
    """
    groups = {row.fused for row in plan if row.fused is not None and row.name in adapted}
    return [row.name for row in plan if row.name in adapted or row.fused in groups]


def _fused(rows: Sequence[ModuleRow], fuse: Sequence[Sequence[str]]) -> dict[str, str]:
    """For each linear that runs as one with others, the first of them.

    ``fuse`` are groups of names, relative to their block. A group runs together where all of it is
    quantized; its weights have the same K.
    """
    shapes = {row.name: row.shape for row in rows if row.quantized}
    first: dict[str, str] = {}
    for group in fuse:
        for name in shapes:
            block = name.removesuffix(group[0])
            members = [block + part for part in group]
            if (
                block != name
                and (not block or block.endswith("."))
                and all(shapes.get(m, ())[1:] == shapes[name][1:] for m in members)
            ):
                first |= dict.fromkeys(members, name)
    return first


def _row(
    name: str,
    module: nn.Linear | nn.Conv2d,
    family: Sequence[str],
    configured: Sequence[str],
    backend: Backend | None,
) -> ModuleRow:
    shape = tuple(module.weight.shape)
    left: str | None = None
    for patterns, whose in (
        (family, "the model family"),
        (configured, "explore.modules_to_not_convert"),
    ):
        for pattern in patterns:
            if pattern.startswith("!"):
                left = None if _matches(name, module, pattern[1:]) else left
            elif left is None and _matches(name, module, pattern):
                left = f"left unquantized by {whose}: {pattern}"
    if left is not None:
        return ModuleRow(name, shape, False, left)
    if isinstance(module, nn.Conv2d) and not is_pointwise(module):
        groups = f" in {module.groups} groups" if module.groups > 1 else ""
        return ModuleRow(name, shape, False, f"a convolution of {shape[2]}x{shape[3]}{groups}")
    refusal = backend.refuses(shape[0], shape[1]) if backend is not None else None
    if refusal is not None:
        return ModuleRow(name, shape, False, refusal)
    kind = (
        "a linear of the blocks"
        if isinstance(module, nn.Linear)
        else "a 1x1 convolution, run as a linear"
    )
    return ModuleRow(name, shape, True, kind)


def _matches(name: str, module: nn.Linear | nn.Conv2d, pattern: str) -> bool:
    """Whether a pattern of ``modules_to_not_convert``, without its "!", is of this module."""
    if size := SMALL.fullmatch(pattern):
        return min(module.weight.shape[:2]) < int(size[1])
    return fnmatchcase(name, pattern)


def is_pointwise(module: nn.Conv2d) -> bool:
    """Whether a convolution is a linear layer over the channels of each pixel."""
    return (
        module.kernel_size == module.stride == (1, 1)
        and module.groups == 1
        and module.padding in ((0, 0), "valid", "same")
    )


def as_linear(module: nn.Linear | nn.Conv2d) -> nn.Linear:
    """A linear, or a 1x1 convolution as the linear that it is, in the same memory."""
    if isinstance(module, nn.Linear):
        return module
    rows, columns = module.weight.shape[:2]
    linear = nn.Linear(columns, rows, bias=False, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().view(rows, columns), requires_grad=False)
    # None where the convolution has none
    linear.bias = module.bias  # pyright: ignore[reportAttributeAccessIssue]
    return linear


def swap_linears(
    transformer: nn.Module,
    plan: Sequence[ModuleRow],
    backend: Backend,
    activation_amax: str = "power_of_two",
    blank: bool = False,
) -> dict[str, QuantizedLinear | FusedMember]:
    """Replace the modules that ``plan`` quantizes by the backend's layers; frees their weights.

    Returns the layers by the name of what they replace; that of a 1x1 convolution lies within the
    module in its place. ``blank``: layers that need no kernels, to be counted and not to be run.
    """
    if not any(row.quantized for row in plan):
        return {}
    replacement = backend.blanks() if blank else backend.replacements(activation_amax)
    swapped: dict[str, QuantizedLinear | FusedMember] = {}
    for row in plan:
        if not row.quantized:
            continue
        module = transformer.get_submodule(row.name)
        if not isinstance(module, nn.Linear | nn.Conv2d):
            raise ValueError(
                f"cannot quantize {row.name!r}: it is a {type(module).__name__}, swap before"
                " anything wraps it"
            )
        # groups follow when all others are swapped: their members are joined at once
        if row.fused is None:
            layer = swapped[row.name] = replacement(as_linear(module))
            transformer.set_submodule(
                row.name, layer if isinstance(module, nn.Linear) else PointwiseConvolution(layer)
            )
    groups: dict[str, list[str]] = {}
    for row in plan:
        if row.fused is not None:
            groups.setdefault(row.fused, []).append(row.name)
    for names in groups.values():
        linears = [as_linear(cast(nn.Linear, transformer.get_submodule(name))) for name in names]
        members = join(linears, replacement)
        for name, member in zip(names, members, strict=True):
            swapped[name] = member
            transformer.set_submodule(name, member)
    return swapped
