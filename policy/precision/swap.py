"""Which modules of a transformer run quantised, and putting quantised layers in their place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from policy.families.base import Family
from policy.precision.backends import Backend


@dataclass(frozen=True)
class ModuleRow:
    """One row of the table that a run writes: a module with a weight matrix, and what becomes of it."""

    name: str
    shape: tuple[int, ...]
    quantised: bool
    why: str


def weight_modules(transformer: nn.Module) -> Iterator[tuple[str, nn.Linear | nn.Conv2d]]:
    """(module path, linear or convolution) in the transformer's order; adapters are looked through, not listed."""
    for name, module in transformer.named_modules():
        if any(part == "base_layer" or part.startswith("lora_") for part in name.split(".")):
            continue
        owner = getattr(module, "base_layer", module)
        if isinstance(owner, nn.Linear | nn.Conv2d):
            yield name, owner


def quantise_plan(
    transformer: nn.Module, family: Family, keep_wide: Sequence[str] = (), backend: Backend | None = None
) -> list[ModuleRow]:
    """A row for every module with a weight matrix of a bare or adapted transformer.

    ``keep_wide`` are further fnmatch patterns beside the family's. Raises ValueError for a pattern that matches nothing.
    """
    modules = list(weight_modules(transformer))
    for pattern in keep_wide:
        if not any(fnmatchcase(name, pattern) for name, _ in modules):
            raise ValueError(f"explore.keep_wide: {pattern!r} matches no module; there are such as {modules[-1][0]!r}")
    return [_row(name, module, family.keep_wide, keep_wide, backend) for name, module in modules]


def _row(
    name: str, module: nn.Linear | nn.Conv2d, family: Sequence[str], configured: Sequence[str], backend: Backend | None
) -> ModuleRow:
    shape = tuple(module.weight.shape)
    for patterns, whose in ((family, "the model family"), (configured, "explore.keep_wide")):
        for pattern in patterns:
            if fnmatchcase(name, pattern):
                return ModuleRow(name, shape, False, f"kept wide by {whose}: {pattern}")
    if not isinstance(module, nn.Linear):
        return ModuleRow(name, shape, False, "a convolution")
    refusal = backend.refuses(module) if backend is not None else None
    if refusal is not None:
        return ModuleRow(name, shape, False, refusal)
    return ModuleRow(name, shape, True, "a linear of the blocks")


def swap_linears(transformer: nn.Module, plan: Sequence[ModuleRow], backend: Backend) -> dict[str, nn.Module]:
    """Replace the modules that ``plan`` quantises by the backend's layers, freeing each wide weight; returns them by name."""
    replace = backend.replacements()
    swapped: dict[str, nn.Module] = {}
    for row in plan:
        if not row.quantised:
            continue
        linear = transformer.get_submodule(row.name)
        if not isinstance(linear, nn.Linear):
            raise ValueError(f"cannot quantise {row.name!r}: it is a {type(linear).__name__}, swap before anything wraps it")
        swapped[row.name] = replace(linear)
        transformer.set_submodule(row.name, swapped[row.name])
    return swapped
