"""Request for a comparison, read from the command line or from a comparison file.

A comparison file is a TOML file such as those of ``configs/comparisons``.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from pydantic import Field, ValidationError

from configs.aliases import current_key
from configs.arms import Arm
from configs.load import HERE, ConfigError, load_tree, value_of
from configs.objectives import OBJECTIVES
from configs.schema import RunConfig
from configs.section import Section, Tree

COMPARISONS = HERE / "comparisons"
OWN = {
    "seed": "give --seeds N, and --set seed=S for the first seed",
    "name": "runs are named after their cell and seed",
    "run_root": "give --out DIR, or --set run_root=DIR",
}
"""Keys that a comparison sets itself in every run, and what the user can do instead."""
SEEDS = 3


class CellEntry(Section):
    """One ``[[cells]]`` entry of a comparison file."""

    name: str
    layers: tuple[str, ...] = ()
    changes: Tree = Field(default_factory=dict, alias="set")


class ComparisonFile(Section):
    """Schema of a comparison file."""

    base: str = Field(description="preset name or TOML file that all cells are built on")
    seeds: int = Field(default=SEEDS, ge=1)
    baseline: str | None = None
    changes: Tree = Field(default_factory=dict, alias="set")
    vary: dict[str, list[object]] = Field(default_factory=dict)
    operations: tuple[float, ...] = Field(
        default=(), description="count operations too, so many quantized ones as one unquantized"
    )
    cells: tuple[CellEntry, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Request:
    """Command line of a comparison; an empty value or None means that the option was not given."""

    source: str
    arms: tuple[str, ...] = ()
    objectives: tuple[str, ...] = ()
    seeds: int | None = None
    overrides: tuple[str, ...] = ()
    vary: tuple[str, ...] = ()
    baseline: str | None = None
    operations: tuple[float, ...] = ()


@dataclass(frozen=True)
class Draft:
    """Cell before the values of varied keys are filled in."""

    name: str
    title: str
    layers: tuple[str, ...]
    changes: Tree


@dataclass(frozen=True)
class ComparisonSpec:
    """Normalized form of a request: draft cells on a common ``base`` with its ``changes``.

    ``name`` is that of the comparison file, or None if there is none.
    """

    base: str
    changes: Tree
    drafts: list[Draft]
    seeds: int
    baseline: str | None
    vary: dict[str, list[object]]
    operations: tuple[float, ...]
    name: str | None


def resolve_request(request: Request) -> ComparisonSpec:
    """Return the request in normalized form, reading the comparison file if it names one.

    Raises ConfigError if options contradict each other or a key cannot be set by a comparison.
    """
    path = comparison_file(request.source)
    if path is None:
        file, drafts = None, _from_arguments(request)
    elif request.arms or request.objectives:
        raise ConfigError(
            f"{request.source} lists its cells: leave out --arms and --objectives, or give a preset"
        )
    else:
        file = _parse_file(path)
        drafts = [Draft(cell.name, cell.name, cell.layers, cell.changes) for cell in file.cells]
    listed = file.vary if file else {}
    _check_own(request, drafts, listed)
    fixed = {current_key(override.partition("=")[0]) for override in request.overrides}
    kept = {key: values for key, values in listed.items() if current_key(key) not in fixed}
    return ComparisonSpec(
        base=file.base if file else request.source,
        changes=file.changes if file else {},
        drafts=drafts,
        seeds=file.seeds if file else 1,
        baseline=request.baseline or (file.baseline if file else None),
        vary=kept | _varied(request.vary, fixed),
        operations=request.operations or (file.operations if file else ()),
        name=path.stem if path else None,
    )


def check_ratios(ratios: tuple[float, ...]) -> tuple[float, ...]:
    """Return ``ratios``; raise ConfigError if one is below 1, not finite, or given twice."""
    for ratio in ratios:
        if not 1 <= ratio < math.inf or ratios.count(ratio) > 1:
            raise ConfigError(
                f"operations: {ratio:g}: expected distinct ratios of at least 1, such as 4,2,1:"
                " quantized operations that take as long as one unquantized"
            )
    return ratios


def comparison_file(source: str) -> Path | None:
    """Return the comparison file that ``source`` names, or None if it names a configuration."""
    path = Path(source)
    if not source.endswith(".toml") and "/" not in source:
        path = COMPARISONS / f"{source}.toml"
    try:
        return path if "cells" in tomllib.loads(path.read_text(encoding="utf-8")) else None
    except (OSError, ValueError, RecursionError):
        return None  # reading it as a configuration will report what is wrong


def _from_arguments(request: Request) -> list[Draft]:
    """Return a draft for every arm and objective, by default those of the configuration."""
    for names, known, option in (
        (request.arms, get_args(Arm), "--arms"),
        (request.objectives, tuple(OBJECTIVES), "--objectives"),
    ):
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(f"{option} {unknown[0]}: one of {', '.join(known)} is expected")
        if len(set(names)) < len(names):
            raise ConfigError(f"{option} {','.join(names)}: a value is given twice")
    for option, key, names in (
        ("--arms", "arm", request.arms),
        ("--objectives", "objective.name", request.objectives),
    ):
        if names and any(override.partition("=")[0] == key for override in request.overrides):
            raise ConfigError(f"{option} and --set {key}=...: give only one of them")
    tree = load_tree(request.source, request.overrides)
    arms = request.arms or (str(tree.get("arm", RunConfig.model_fields["arm"].default)),)
    objectives: tuple[str | None, ...] = request.objectives or (None,)
    drafts: list[Draft] = []
    for arm, objective in itertools.product(arms, objectives):
        alone = len(objectives) == 1 or objective is None
        parts = [arm] if alone else [objective or ""] if len(arms) == 1 else [arm, objective or ""]
        layers = (f"objectives/{objective}",) if objective else ()
        drafts.append(Draft("-".join(parts), " · ".join(parts), layers, {"arm": arm}))
    return drafts


def _parse_file(path: Path) -> ComparisonFile:
    try:
        return ComparisonFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise ConfigError(
            [
                f"{path}: {'.'.join(map(str, item['loc']))} = {item['input']!r}: {item['msg']}"
                for item in error.errors()
            ]
        ) from None


def _check_own(request: Request, drafts: Sequence[Draft], varied: Iterable[str]) -> None:
    """Raise ConfigError if a cell sets a key of ``OWN``, because its runs would not use it."""
    keys = [(f"--vary {text}", text.partition("=")[0]) for text in request.vary]
    keys += [(f"{request.source}: vary: {key}", key) for key in varied]
    keys += [
        (f"{request.source}: cell {draft.name!r}: set: {key}", key)
        for draft in drafts
        for key in draft.changes
    ]
    for where, key in keys:
        if key in OWN:
            raise ConfigError(f"{where}: a cell cannot set {key}: {OWN[key]}")


def _varied(texts: Sequence[str], fixed: Container[str]) -> dict[str, list[object]]:
    """Parse ``key=v1,v2`` into key -> values, each of them a TOML value or a plain word."""
    varied: dict[str, list[object]] = {}
    for text in texts:
        key, separator, values = text.partition("=")
        if not separator or not values or not all(key.split(".")):
            raise ConfigError(
                f"--vary {text}: expected key=value,value, such as explore.steps=2,4,6,8"
            )
        if current_key(key) in fixed or key in varied:
            raise ConfigError(f"--vary {text}: {key} is given twice")
        try:
            varied[key] = tomllib.loads(f"values = [{values}]")["values"]
        # some are words, or a value that Python cannot represent
        except (ValueError, RecursionError):
            varied[key] = [_value(value.strip()) for value in values.split(",")]
    return varied


def _value(text: str) -> object:
    try:
        return value_of(text)
    except (ValueError, RecursionError):
        return text  # refused later, with its key
