"""What a comparison runs: cells (an arm, an objective, changes) that are equal in everything else,
and run seeds.

Cells come from the command line (arms x objectives x values of varied keys) or from a comparison
file, a TOML file such as those of ``configs/comparisons``. Everything is read and checked here,
before anything is started.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import Field, ValidationError

from configs.aliases import current_key
from configs.load import HERE, ConfigError, apply, lay_over, layer, parse, tree_of
from configs.objectives import OBJECTIVES
from configs.schema import NAME, Arm, RunConfig
from configs.section import Section

COMPARISONS = HERE / "comparisons"
ALIKE = (
    "evaluate.steps",
    "evaluate.solver",
    "evaluate.prompts",
    "evaluate.noises",
    "evaluate.weights",
    "prompts.test",
    "rewards.scorers",
    "rewards.evaluation_scorers",
)
"""Keys that must be equal in all cells, or their scores could not be compared."""
UNUSED = {
    "diffusionnft": ("explore.*", "selection.rule"),
    "naive_scaling": ("explore.*", "-explore.pool_size", "-explore.chunk_size"),
    "naive_quant": ("explore.steps", "explore.solver"),
    "sol_rl": (),
}
"""Keys that change nothing under an arm: varying them there would run the same cell again. A minus
excepts a key.
"""
OWN = {
    "seed": "give --seeds N, and --set seed=S for the first of them",
    "name": "runs are named after their cell and seed",
    "run_root": "give --out DIR, or --set run_root=DIR",
}
"""Keys that every run of a comparison gets from it, and what to do instead of setting them for a
cell.
"""
SEEDS = 3


class CellOfFile(Section):
    """``[[cells]]``"""

    name: str
    layers: tuple[str, ...] = ()
    changes: dict[str, Any] = Field(default_factory=dict, alias="set")


class ComparisonFile(Section):
    """A comparison file."""

    base: str = Field(description="preset name or TOML file that all cells are built on")
    seeds: int = Field(default=SEEDS, ge=1)
    baseline: str | None = None
    changes: dict[str, Any] = Field(default_factory=dict, alias="set")
    vary: dict[str, list[Any]] = Field(default_factory=dict)
    cells: tuple[CellOfFile, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Request:
    """What the command line asks for; empty means: not given."""

    source: str
    arms: tuple[str, ...] = ()
    objectives: tuple[str, ...] = ()
    seeds: int | None = None
    overrides: tuple[str, ...] = ()
    vary: tuple[str, ...] = ()
    baseline: str | None = None


@dataclass(frozen=True)
class Cell:
    """One row of the table. ``tree`` is its configuration before defaults; ``refused`` says why it
    cannot be run.
    """

    name: str
    title: str
    tree: dict[str, Any]
    refused: str | None = None

    def run_name(self, seed: int) -> str:
        """Names the run, and its directory, of one run seed."""
        return f"{self.name}-seed{seed}"

    def tree_of(self, seed: int, out: Path) -> dict[str, Any]:
        """The whole configuration of one run, as plain values."""
        return {**self.tree, "seed": seed, "name": self.run_name(seed), "run_root": str(out)}


@dataclass(frozen=True)
class Comparison:
    """Cells x run seeds. ``baseline`` names the cell that the others are held against; ``root`` is
    where runs are written.
    """

    name: str
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    baseline: str
    root: Path

    @property
    def running(self) -> tuple[Cell, ...]:
        """The cells that are possible."""
        return tuple(cell for cell in self.cells if cell.refused is None)


def read_comparison(request: Request) -> Comparison:
    """The comparison that a command line describes.

    Raises:
        ConfigError: something is unknown or misspelt, all cells are impossible, or cells would be
            evaluated differently.
    """
    path = comparison_file(request.source)
    if path is None:
        base, given, drafts = _from_arguments(request)
        seeds, baseline, varied = 1, request.baseline, {}
    else:
        file = _parse_file(path)
        if request.arms or request.objectives:
            raise ConfigError(
                [
                    f"{request.source} lists its cells: leave --arms and --objectives out, or give"
                    " a preset"
                ]
            )
        base, given = file.base, file.changes
        drafts = [(cell.name, cell.name, cell.layers, cell.changes) for cell in file.cells]
        seeds, varied = file.seeds, file.vary
        baseline = request.baseline or file.baseline
    seeds = seeds if request.seeds is None else request.seeds
    if seeds < 1:
        raise ConfigError([f"--seeds {seeds}: at least 1 is needed"])
    fixed = {current_key(override.partition("=")[0]) for override in request.overrides}
    _check_own(request, drafts, varied)
    varied = {
        **{key: values for key, values in varied.items() if current_key(key) not in fixed},
        **_varied(request.vary, fixed),
    }
    common = tree_of(base)
    lay_over(common, given)
    apply(common, *request.overrides)
    cells = [cell for draft in drafts for cell in _cells_of(common, draft, varied, request)]
    _check(cells)
    first = common.get("seed", 0)
    name = path.stem if path else str(common.get("name", "compare"))
    root = Path(common.get("run_root") or "runs")
    return Comparison(
        name, tuple(cells), tuple(range(first, first + seeds)), _baseline(cells, baseline), root
    )


def _check_own(request: Request, drafts: Sequence[Draft], varied: Mapping[str, Any]) -> None:
    """Raises ConfigError for a cell that asks for a value that its runs would not have: it would be
    run twice.
    """
    asked = [(f"--vary {text}", text.partition("=")[0]) for text in request.vary]
    asked += [(f"{request.source}: vary: {key}", key) for key in varied]
    asked += [
        (f"{request.source}: cell {name!r}: set: {key}", key)
        for name, _, _, changes in drafts
        for key in changes
    ]
    for where, key in asked:
        if key in OWN:
            raise ConfigError([f"{where}: no cell has a {key} of its own: {OWN[key]}"])


def comparison_file(source: str) -> Path | None:
    """The comparison file that ``source`` names; None: it is a preset or an ordinary configuration
    file.
    """
    path = Path(source)
    if not source.endswith(".toml") and "/" not in source:
        path = COMPARISONS / f"{source}.toml"
    try:
        return path if "cells" in tomllib.loads(path.read_text(encoding="utf-8")) else None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return None  # reading it as a configuration says what is wrong


# ---- drafts: (name, title, layers, changes)

Draft = tuple[str, str, tuple[str, ...], dict[str, Any]]


def _from_arguments(request: Request) -> tuple[str, dict[str, Any], list[Draft]]:
    """Arms x objectives; without either, the configuration's own."""
    for given, known, option in (
        (request.arms, get_args(Arm), "--arms"),
        (request.objectives, tuple(OBJECTIVES), "--objectives"),
    ):
        if strange := [name for name in given if name not in known]:
            raise ConfigError([f"{option} {strange[0]}: one of {', '.join(known)} is expected"])
        if len(set(given)) < len(given):
            raise ConfigError([f"{option} {','.join(given)}: one of them is given twice"])
    for option, key, given in (
        ("--arms", "arm", request.arms),
        ("--objectives", "objective.name", request.objectives),
    ):
        if given and any(override.partition("=")[0] == key for override in request.overrides):
            raise ConfigError([f"{option} and --set {key}=...: give one of the two"])
    tree = tree_of(request.source, request.overrides)
    arms = request.arms or (str(tree.get("arm", RunConfig.model_fields["arm"].default)),)
    objectives: tuple[str | None, ...] = request.objectives or (None,)
    drafts: list[Draft] = []
    for arm, objective in itertools.product(arms, objectives):
        alone = len(objectives) == 1 or objective is None
        parts = [arm] if alone else [objective or ""] if len(arms) == 1 else [arm, objective or ""]
        layers = (f"objectives/{objective}",) if objective else ()
        drafts.append(("-".join(parts), " · ".join(parts), layers, {"arm": arm}))
    return request.source, {}, drafts


def _parse_file(path: Path) -> ComparisonFile:
    try:
        file = ComparisonFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise ConfigError(
            [
                f"{path}: {'.'.join(map(str, item['loc']))} = {item['input']!r}: {item['msg']}"
                for item in error.errors()
            ]
        ) from None
    return file


def _varied(texts: Sequence[str], fixed: Container[str]) -> dict[str, list[Any]]:
    """``key=v1,v2`` as key -> values, each read as a TOML value or else as a plain word."""
    found: dict[str, list[Any]] = {}
    for text in texts:
        key, separator, values = text.partition("=")
        if not separator or not values or not all(key.split(".")):
            raise ConfigError(
                [f"--vary {text}: expected key=value,value, such as explore.steps=2,4,6,8"]
            )
        if current_key(key) in fixed or key in found:
            raise ConfigError([f"--vary {text}: {key} is given twice"])
        try:
            found[key] = tomllib.loads(f"values = [{values}]")["values"]
        except tomllib.TOMLDecodeError:
            found[key] = [value.strip() for value in values.split(",")]
    return found


# ---- cells


def _cells_of(
    common: dict[str, Any], draft: Draft, varied: Mapping[str, list[Any]], request: Request
) -> list[Cell]:
    """The draft once for every combination of the varied values that its arm uses."""
    name, title, layers, changes = draft
    tree: dict[str, Any] = {}
    lay_over(tree, common)
    for each in layers:
        lay_over(tree, layer(each, request.source))
    lay_over(tree, changes)
    # once more: a cell's layers do not undo what the command line says
    apply(tree, *request.overrides)
    used = {
        key: values
        for key, values in varied.items()
        if not _unused(str(tree.get("arm", "sol_rl")), key)
    }
    cells = []
    for values in itertools.product(*used.values()):
        chosen: dict[str, Any] = {}
        lay_over(chosen, tree)
        pairs = list(zip(used, values, strict=True))
        for key, value in pairs:
            lay_over(chosen, _nested(key, value))
        slug = "-".join([name, *(f"{key}-{_word(value)}" for key, value in pairs)])
        cells.append(
            _cell(slug, " · ".join([title, *(f"{key} = {value}" for key, value in pairs)]), chosen)
        )
    return cells


def _cell(name: str, title: str, tree: dict[str, Any]) -> Cell:
    """The cell, refused where its values do not go together; a wrong key or value of its own is an
    error.
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
    patterns = UNUSED.get(arm, ())
    if f"-{key}" in patterns:
        return False
    return any(
        key == pattern or (pattern.endswith(".*") and key.startswith(pattern[:-1]))
        for pattern in patterns
    )


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _word(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "_", str(value)).strip("_") or "empty"


def _check(cells: Sequence[Cell]) -> None:
    """Names that can be directories and are distinct; something to run; the same evaluation
    everywhere.
    """
    for cell in cells:
        if not NAME.fullmatch(cell.run_name(10**6)):
            raise ConfigError(
                [
                    f"cell {cell.name!r}: letters, digits, '.', '_' and '-' only, and not much"
                    " longer than this sentence"
                ]
            )
    names = [cell.name for cell in cells]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError([f"cell {twice[0]!r} is there twice: give the cells distinct names"])
    running = [cell for cell in cells if cell.refused is None]
    if not running:
        raise ConfigError([f"cell {cell.title}: {cell.refused}" for cell in cells])
    check_alike(
        {cell.title: parse({**cell.tree, "name": "cell", "run_root": None}) for cell in running}
    )


def check_alike(configs: Mapping[str, RunConfig]) -> None:
    """Raises ConfigError unless all are evaluated alike; ``configs`` by the name that an error
    should call them.
    """
    (first, one), *others = configs.items()
    for key in ALIKE:
        wanted = _value(one, key)
        for name, other in others:
            if (found := _value(other, key)) != wanted:
                raise ConfigError(
                    [
                        f"{key}: {wanted!r} in {first}, {found!r} in {name}: scores can be compared"
                        " only when both are evaluated alike"
                    ]
                )


def _value(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _baseline(cells: Sequence[Cell], wanted: str | None) -> str:
    """The name of the cell that others are held against; the first one unless told. A varied cell
    goes by its first value.
    """
    possible = [cell.name for cell in cells if cell.refused is None]
    if wanted is None:
        return possible[0]
    for name in possible:
        if name == wanted or name.startswith(f"{wanted}-"):
            return name
    raise ConfigError(
        [f"--baseline {wanted}: no such cell that can be run; there are: {', '.join(possible)}"]
    )
