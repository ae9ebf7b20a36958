"""Cells of a comparison: configurations that differ in arm, objective or single changes.

All of a request is read and checked here, before any run is started.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from analysis.compare.groups import check_alike
from analysis.compare.request import Draft, Request, check_ratios, resolve_request
from configs.load import ConfigError, apply, layer, load_tree, merge_over, parse
from configs.resume import matches_key
from configs.schema import NAME, RunConfig
from configs.section import Tree

UNUSED = {
    "diffusionnft": ("explore", "selection.rule"),
    "naive_scaling": ("explore", "-explore.pool_size", "-explore.chunk_size"),
    "naive_quant": ("explore.steps", "explore.solver"),
    "sol_rl": (),
}
"""Keys that an arm does not use, so that varying them would only repeat a cell.

A minus marks a key that is used although its parent is listed.
"""


@dataclass(frozen=True)
class Cell:
    """Configuration that is run for every run seed: a row of the tables.

    ``tree`` does not include the defaults. ``refused`` is the reason why the cell cannot be run, or
    None.
    """

    name: str
    title: str
    tree: Tree
    refused: str | None = None

    def run_name(self, seed: int) -> str:
        """Return the name of the run of one run seed, which is also that of its directory."""
        return f"{self.name}-seed{seed}"

    def tree_of(self, seed: int, out: Path) -> Tree:
        """Return the configuration of one run as plain values, without the defaults."""
        return {**self.tree, "seed": seed, "name": self.run_name(seed), "run_root": str(out)}


@dataclass(frozen=True)
class Comparison:
    """Cells x run seeds, compared with the cell ``baseline``.

    Results are written below ``root`` by default. ``operations`` holds the ratios at which
    operations are counted.
    """

    name: str
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    baseline: str
    root: Path
    operations: tuple[float, ...] = ()

    @property
    def running(self) -> tuple[Cell, ...]:
        """The cells that are not refused."""
        return tuple(cell for cell in self.cells if cell.refused is None)


def read_comparison(request: Request) -> Comparison:
    """Return the comparison that a request describes.

    Raises:
        ConfigError: a name or key is unknown, all cells are refused, or cells would be evaluated
            differently.
    """
    requested = resolve_request(request)
    seeds = requested.seeds if request.seeds is None else request.seeds
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}: at least 1 is needed")
    common = load_tree(requested.base)
    # otherwise seconds of iterations would not include images explored during evaluations
    merge_over(common, {"evaluate": {"explore_meanwhile": False}})
    merge_over(common, requested.changes)
    apply(common, *request.overrides)
    cells = [
        cell
        for draft in requested.drafts
        for cell in _cells_of(common, draft, requested.vary, request)
    ]
    _check(cells)
    first = int(common.get("seed", 0))
    name = requested.name or str(common.get("name", "compare"))
    root = Path(str(common.get("run_root") or "runs"))
    return Comparison(
        name,
        tuple(cells),
        tuple(range(first, first + seeds)),
        _baseline(cells, requested.baseline),
        root,
        check_ratios(requested.operations),
    )


# ---- cells


def _cells_of(
    common: Tree, draft: Draft, varied: Mapping[str, list[object]], request: Request
) -> list[Cell]:
    """Return a cell for every combination of those varied values that the draft's arm uses."""
    tree: Tree = {}
    merge_over(tree, common)
    for layer_name in draft.layers:
        merge_over(tree, layer(layer_name, request.source))
    merge_over(tree, draft.changes)
    # apply overrides again, because the cell's layers may have replaced their values
    apply(tree, *request.overrides)
    used = {
        key: values
        for key, values in varied.items()
        if not _unused(str(tree.get("arm", "sol_rl")), key)
    }
    cells = []
    for values in itertools.product(*used.values()):
        chosen: Tree = {}
        merge_over(chosen, tree)
        pairs = list(zip(used, values, strict=True))
        for key, value in pairs:
            merge_over(chosen, _nested(key, value))
        slug = "-".join([draft.name, *(f"{key}-{_word(value)}" for key, value in pairs)])
        cells.append(
            _cell(
                slug,
                " · ".join([draft.title, *(f"{key} = {value}" for key, value in pairs)]),
                chosen,
            )
        )
    return cells


def _cell(name: str, title: str, tree: Tree) -> Cell:
    """Return the cell, marked as refused if its values contradict each other.

    Raises ConfigError if a single key or value is invalid.
    """
    named = {**tree, "name": "cell", "run_root": None}
    try:
        RunConfig.model_validate(named)
    except ValidationError as error:
        try:
            parse(named)
        except ConfigError as invalid:
            if any(item["loc"] for item in error.errors()):
                raise ConfigError([f"cell {title}: {line}" for line in invalid.lines]) from None
            return Cell(name, title, tree, "; ".join(invalid.lines))
    return Cell(name, title, tree)


def _unused(arm: str, key: str) -> bool:
    unused = UNUSED.get(arm, ())
    return f"-{key}" not in unused and any(matches_key(pattern, key) for pattern in unused)


def _nested(key: str, value: object) -> Tree:
    *parents, last = key.split(".")
    tree: Tree = {last: value}
    for part in reversed(parents):
        tree = {part: tree}
    return tree


def _word(value: object) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "_", str(value)).strip("_") or "empty"


def _check(cells: Sequence[Cell]) -> None:
    """Raise ConfigError for unusable or repeated names, nothing to run, or unequal evaluations."""
    for cell in cells:
        if not NAME.fullmatch(cell.run_name(10**6)):
            raise ConfigError(
                f"cell {cell.name!r}: letters, digits, '.', '_' and '-' only, and at most 100"
                " characters"
            )
    names = [cell.name for cell in cells]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"cell {twice[0]!r} occurs twice: give the cells distinct names")
    running = [cell for cell in cells if cell.refused is None]
    if not running:
        raise ConfigError([f"cell {cell.title}: {cell.refused}" for cell in cells])
    check_alike(
        {cell.title: parse({**cell.tree, "name": "cell", "run_root": None}) for cell in running}
    )


def _baseline(cells: Sequence[Cell], requested: str | None) -> str:
    """Return the name of the cell that others are compared with.

    That is the first cell which can run and, if ``requested`` is given, has that name or extends it
    by varied values. Raises ConfigError if there is none.
    """
    runnable = [cell.name for cell in cells if cell.refused is None]
    if requested is None:
        return runnable[0]
    for name in runnable:
        if name == requested or name.startswith(f"{requested}-"):
            return name
    raise ConfigError(
        f"--baseline {requested}: no cell of this name can be run; available: {', '.join(runnable)}"
    )
