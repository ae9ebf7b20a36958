"""What a comparison runs: cells, equal in all but an arm, an objective or changes, and run seeds.

Everything is read and checked here, before anything is started.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from analysis.compare.groups import check_alike
from analysis.compare.request import Draft, Request, check_ratios, described
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
"""Keys that an arm does not use, so that varying them runs a cell twice; a minus excepts a key."""


@dataclass(frozen=True)
class Cell:
    """A row of the table; ``tree`` lacks the defaults, ``refused`` says why it cannot be run."""

    name: str
    title: str
    tree: Tree
    refused: str | None = None

    def run_name(self, seed: int) -> str:
        """Names the run, and its directory, of one run seed."""
        return f"{self.name}-seed{seed}"

    def tree_of(self, seed: int, out: Path) -> Tree:
        """The whole configuration of one run, as plain values."""
        return {**self.tree, "seed": seed, "name": self.run_name(seed), "run_root": str(out)}


@dataclass(frozen=True)
class Comparison:
    """Cells x run seeds, compared with the cell ``baseline``; runs are written below ``root``.

    ``operations``: ratios at which operations are counted.
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
    """The comparison that a command line describes.

    Raises:
        ConfigError: something is unknown or misspelt, all cells are impossible, or cells would be
            evaluated differently.
    """
    wanted = described(request)
    seeds = wanted.seeds if request.seeds is None else request.seeds
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}: at least 1 is needed")
    common = load_tree(wanted.base)
    # or seconds of iterations would lack what was explored during evaluations
    merge_over(common, {"evaluate": {"explore_meanwhile": False}})
    merge_over(common, wanted.changes)
    apply(common, *request.overrides)
    cells = [
        cell for draft in wanted.drafts for cell in _cells_of(common, draft, wanted.vary, request)
    ]
    _check(cells)
    first = int(common.get("seed", 0))
    name = wanted.name or str(common.get("name", "compare"))
    root = Path(str(common.get("run_root") or "runs"))
    return Comparison(
        name,
        tuple(cells),
        tuple(range(first, first + seeds)),
        _baseline(cells, wanted.baseline),
        root,
        check_ratios(wanted.operations),
    )


# ---- cells


def _cells_of(
    common: Tree, draft: Draft, varied: Mapping[str, list[object]], request: Request
) -> list[Cell]:
    """The draft once for every combination of the varied values that its arm uses."""
    tree: Tree = {}
    merge_over(tree, common)
    for each in draft.layers:
        merge_over(tree, layer(each, request.source))
    merge_over(tree, draft.changes)
    # once more, as the cell's layers may have undone what the command line says
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
    """The cell, refused where its values do not go together. Raises ConfigError for a wrong key or
    value.
    """
    named = {**tree, "name": "cell", "run_root": None}
    try:
        RunConfig.model_validate(named)
    except ValidationError as error:
        try:
            parse(named)
        except ConfigError as wrong:
            if any(item["loc"] for item in error.errors()):
                raise ConfigError([f"cell {title}: {line}" for line in wrong.lines]) from None
            return Cell(name, title, tree, "; ".join(wrong.lines))
    return Cell(name, title, tree)


def _unused(arm: str, key: str) -> bool:
    unused = UNUSED.get(arm, ())
    return f"-{key}" not in unused and any(matches_key(each, key) for each in unused)


def _nested(key: str, value: object) -> Tree:
    *parents, last = key.split(".")
    tree: Tree = {last: value}
    for part in reversed(parents):
        tree = {part: tree}
    return tree


def _word(value: object) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "_", str(value)).strip("_") or "empty"


def _check(cells: Sequence[Cell]) -> None:
    """Raises ConfigError for unusable names, nothing to run, or unequal evaluations."""
    for cell in cells:
        if not NAME.fullmatch(cell.run_name(10**6)):
            raise ConfigError(
                f"cell {cell.name!r}: letters, digits, '.', '_' and '-' only, and not much"
                " longer than this sentence"
            )
    names = [cell.name for cell in cells]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"cell {twice[0]!r} is there twice: give the cells distinct names")
    running = [cell for cell in cells if cell.refused is None]
    if not running:
        raise ConfigError([f"cell {cell.title}: {cell.refused}" for cell in cells])
    check_alike(
        {cell.title: parse({**cell.tree, "name": "cell", "run_root": None}) for cell in running}
    )


def _baseline(cells: Sequence[Cell], wanted: str | None) -> str:
    """The cell that others are compared with: the first, or the first whose name begins so."""
    possible = [cell.name for cell in cells if cell.refused is None]
    if wanted is None:
        return possible[0]
    for name in possible:
        if name == wanted or name.startswith(f"{wanted}-"):
            return name
    raise ConfigError(
        f"--baseline {wanted}: no such cell that can be run; there are: {', '.join(possible)}"
    )
