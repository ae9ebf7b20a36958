"""Selection of the modules that run quantized, and their replacement by quantized layers."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import cast

from torch import nn

from policy.families.base import Family
from policy.precision.backends import Backend
from policy.precision.fused import FusedMember, fuse_linears
from policy.precision.layer import PointwiseConvolution, QuantizedLinear

SMALL = re.compile(r"dim<(\d+)")
"""Pattern ``dim<N`` of ``modules_to_not_convert``: layers with a dimension below N."""


@dataclass(frozen=True)
class ModuleRow:
    """One row of the table that a run writes: a module with a weight matrix, quantized or not.

    ``fused`` is the name of the first linear of its fused group, whose members read the same input
    and run as one product.
    """

    name: str
    shape: tuple[int, ...]
    quantized: bool
    why: str
    fused: str | None = None


def weight_modules(transformer: nn.Module) -> Iterator[tuple[str, nn.Linear | nn.Conv2d]]:
    """Yield (module path, linear or convolution) in module order, without those of adapters."""
    for name, module in transformer.named_modules():
        # skipped here: an adapted weight is listed once, by the path of the wrapping module
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
    """Return a row for every module with a weight matrix of a bare or adapted transformer.

    ``modules_to_not_convert`` are fnmatch patterns in addition to the family's; the last matching
    pattern decides, and ``!PATTERN`` includes modules again. ``dim<N`` matches layers with fewer
    than N rows or columns. Raises ValueError for a pattern that matches nothing.
    """
    modules = list(weight_modules(transformer))
    for pattern in modules_to_not_convert:
        if not any(_matches(name, module, pattern.removeprefix("!")) for name, module in modules):
            raise ValueError(
                f"explore.modules_to_not_convert: {pattern!r} matches no module; existing names"
                f" are such as {modules[-1][0]!r}"
            )
    rows = [
        _row(name, module, family.modules_to_not_convert, modules_to_not_convert, backend)
        for name, module in modules
    ]
    first = _fused_groups(rows, family.fuse) if backend is not None and backend.fuses else {}
    return [replace(row, fused=first.get(row.name)) for row in rows]


def changing_modules(plan: Sequence[ModuleRow], adapted: Container[str]) -> list[str]:
    """Return the modules whose packed weights may change from version to version.

    These are the adapted modules and all modules fused with an adapted one, because a fused group
    shares its amax.
    """
    groups = {row.fused for row in plan if row.fused is not None and row.name in adapted}
    return [row.name for row in plan if row.name in adapted or row.fused in groups]


def _fused_groups(rows: Sequence[ModuleRow], fuse: Sequence[Sequence[str]]) -> dict[str, str]:
    """Map each linear that runs fused with others to the first linear of its group.

    ``fuse`` are groups of names, relative to their block. A group is fused if all its members are
    quantized and have the same K.
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
    excluded: str | None = None
    for patterns, source in (
        (family, "the model family"),
        (configured, "explore.modules_to_not_convert"),
    ):
        for pattern in patterns:
            if pattern.startswith("!"):
                excluded = None if _matches(name, module, pattern[1:]) else excluded
            elif excluded is None and _matches(name, module, pattern):
                excluded = f"left unquantized by {source}: {pattern}"
    if excluded is not None:
        return ModuleRow(name, shape, False, excluded)
    if isinstance(module, nn.Conv2d) and not is_pointwise(module):
        groups = f" in {module.groups} groups" if module.groups > 1 else ""
        return ModuleRow(name, shape, False, f"a convolution of {shape[2]}x{shape[3]}{groups}")
    refusal = backend.unsupported_reason(shape[0], shape[1]) if backend is not None else None
    if refusal is not None:
        return ModuleRow(name, shape, False, refusal)
    kind = (
        "a linear layer of the blocks"
        if isinstance(module, nn.Linear)
        else "a 1x1 convolution, run as a linear layer"
    )
    return ModuleRow(name, shape, True, kind)


def _matches(name: str, module: nn.Linear | nn.Conv2d, pattern: str) -> bool:
    """Return True if a pattern of ``modules_to_not_convert``, without "!", matches this module."""
    if size := SMALL.fullmatch(pattern):
        return min(module.weight.shape[:2]) < int(size[1])
    return fnmatchcase(name, pattern)


def is_pointwise(module: nn.Conv2d) -> bool:
    """Return True if a convolution is a linear layer over the channels of each pixel."""
    return (
        module.kernel_size == module.stride == (1, 1)
        and module.groups == 1
        and module.padding in ((0, 0), "valid", "same")
    )


def as_linear(module: nn.Linear | nn.Conv2d) -> nn.Linear:
    """Return a linear, or a 1x1 convolution as a linear that shares its memory."""
    if isinstance(module, nn.Linear):
        return module
    rows, columns = module.weight.shape[:2]
    linear = nn.Linear(columns, rows, bias=False, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().view(rows, columns), requires_grad=False)
    # None if the convolution has no bias
    linear.bias = module.bias  # pyright: ignore[reportAttributeAccessIssue]
    return linear


def swap_linears(
    transformer: nn.Module,
    plan: Sequence[ModuleRow],
    backend: Backend,
    activation_amax: str = "power_of_two",
    blank: bool = False,
) -> dict[str, QuantizedLinear | FusedMember]:
    """Replace the modules that ``plan`` quantizes by the backend's layers, and free their weights.

    Returns the layers by the name of the module that they replace; the layer of a 1x1 convolution
    is inside the module that replaces it. ``blank`` creates layers that need no kernels, for
    counting only. Raises ValueError if a module of the plan is wrapped, as by an adapter.
    """
    if not any(row.quantized for row in plan):
        return {}
    replacement = (
        backend.placeholder_replacements() if blank else backend.replacements(activation_amax)
    )
    swapped: dict[str, QuantizedLinear | FusedMember] = {}
    for row in plan:
        if not row.quantized:
            continue
        module = transformer.get_submodule(row.name)
        if not isinstance(module, nn.Linear | nn.Conv2d):
            raise ValueError(
                f"cannot quantize {row.name!r}: it is a {type(module).__name__}; quantize it"
                " before it is wrapped"
            )
        # fused groups follow below, because their members are joined together
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
        members = fuse_linears(linears, replacement)
        for name, member in zip(names, members, strict=True):
            swapped[name] = member
            transformer.set_submodule(name, member)
    return swapped
