"""From a preset name or a TOML file, plus overrides, to a checked ``RunConfig``.

A file may name layers it is built on: ``layers = ["models/shapes", "rewards/shapes"]``, read from
``configs/layers`` before the file itself; later wins, key by key. ``--set a.b=c`` comes last. Every
error is one line that names the key, the value, what is allowed and the nearest spelling.
"""

from __future__ import annotations

import copy
import difflib
import tomllib
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from configs.objectives import OBJECTIVES, DiffusionNFTSettings
from configs.schema import Arm, RunConfig

HERE = Path(__file__).parent
LAYERS = HERE / "layers"
PRESETS = HERE / "presets"
MODELS = ("sd35_medium", "sd35_large", "flux1", "sana")
REWARDS = ("imagereward", "clipscore", "pickscore", "hpsv2")
RECIPES = {
    "flow_grpo": "objectives/flow_grpo_preference",
    "dance_grpo": "objectives/dance_grpo",
    "awm": "objectives/awm",
}
"""The other objectives of the paper's FLUX.1 table: they train on all that they sample, as arm
``diffusionnft`` does.
"""
DEFAULT_OBJECTIVE = DiffusionNFTSettings().name


class ConfigError(Exception):
    """The user's configuration is wrong; ``lines`` has one line per error. Exit code 2."""

    def __init__(self, lines: str | Sequence[str]):
        self.lines = [lines] if isinstance(lines, str) else list(lines)
        super().__init__("\n".join(self.lines))


def preset_names() -> list[str]:
    """Names that ``load`` accepts besides file paths: the files of ``configs/presets``, then the
    composed ones.
    """
    return [*sorted(path.stem for path in PRESETS.glob("*.toml")), *_composed()]


def _composed() -> dict[str, dict[str, Any]]:
    """``<model>-<arm>-<reward>`` and ``flux1-<objective>-<reward>``, each as the file it stands
    for.
    """
    rows = [(model, arm, arm, None) for model in MODELS for arm in get_args(Arm)]
    rows += [("flux1", objective, "diffusionnft", layer) for objective, layer in RECIPES.items()]
    return {
        (name := f"{model}-{what}-{reward}"): {
            "layers": [
                f"models/{model}",
                "recipes/full_size",
                *([extra] if extra else []),
                f"rewards/{reward}",
            ],
            "name": name,
            "arm": arm,
        }
        for model, what, arm, extra in rows
        for reward in REWARDS
    }


def load(source: str, overrides: Iterable[str] = ()) -> RunConfig:
    """The configuration that ``source`` (a preset name or TOML file) and ``--set`` overrides
    describe.

    Raises:
        ConfigError: the source is not found or not TOML, or a key or value is not allowed.
    """
    return parse(tree_of(source, overrides))


def tree_of(source: str, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The plain tree that ``load`` checks. Raises ConfigError for what is not found, not TOML, or
    no override.
    """
    tree = _with_layers(_tree(source), source)
    for override in overrides:
        apply(tree, override)
    return tree


def parse(tree: dict[str, Any]) -> RunConfig:
    """A ``RunConfig`` from a plain tree such as ``config.json`` holds. Raises ConfigError."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError([_line(item) for item in error.errors()]) from None


def _tree(source: str) -> dict[str, Any]:
    """What a file, a preset's file or a composed name says, its layers not yet read."""
    if source.endswith(".toml") or "/" in source:
        path = Path(source)
        if not path.is_file():
            raise ConfigError(
                [f"{source}: no such file; `sol-rl config --list` prints the presets"]
            )
        return _read(path)
    if source in (composed := _composed()):
        return composed[source]
    path = PRESETS / f"{source}.toml"
    if not path.is_file():
        raise ConfigError(
            [
                f"{source}: no preset of that name{_nearest(source, preset_names())}; `sol-rl"
                " config --list` prints all"
            ]
        )
    return _read(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError([f"{path}: not readable as TOML: {error}"]) from None


def _with_layers(tree: dict[str, Any], source: str) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    layers = tree.pop("layers", [])
    if not isinstance(layers, list) or not all(isinstance(name, str) for name in layers):
        raise ConfigError(
            [f"{source}: layers = {layers!r}: a list of names under configs/layers is expected"]
        )
    for name in layers:
        _merge(merged, layer(name, source))
    _merge(merged, tree)
    return merged


def layer(name: str, source: str) -> dict[str, Any]:
    """What the layer ``name`` says; ``source`` is who asks for it. Raises ConfigError."""
    path = LAYERS / f"{name}.toml"
    if not path.is_file():
        known = [str(p.relative_to(LAYERS).with_suffix("")) for p in LAYERS.rglob("*.toml")]
        raise ConfigError(
            [
                f"{source}: layers: no layer {name!r}{_nearest(name, known)}; there are:"
                f" {', '.join(sorted(known))}"
            ]
        )
    return _read(path)


def lay_over(tree: dict[str, Any], above: dict[str, Any]) -> None:
    """Put ``above`` on ``tree``, key by key. Another objective's name takes the settings of the one
    below away.
    """
    below, given = tree.get("objective"), above.get("objective")
    if isinstance(below, dict) and isinstance(given, dict):
        name = below.get("name", DEFAULT_OBJECTIVE)
        if given.get("name", name) != name:
            tree["objective"] = {}
    _merge(tree, copy.deepcopy(above))


def _merge(into: dict[str, Any], tree: dict[str, Any]) -> None:
    for key, value in tree.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def apply(tree: dict[str, Any], override: str) -> None:
    """Set ``a.b=c`` in the tree; ``c`` is read as a TOML value, or else as a plain string."""
    dotted, separator, text = override.partition("=")
    if not separator or not all(dotted.split(".")):
        raise ConfigError([f"--set {override}: expected key=value, such as explore.steps=4"])
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = dotted.split(".")
    node = tree
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError([f"--set {override}: {parent} is a value, not a table"])
    node[last] = value


def _line(error: Any) -> str:
    """One pydantic error as one line: key = value, what is allowed, nearest spelling."""
    location = [str(part) for part in error["loc"]]
    tables = location[:-1]
    if location[:1] == ["objective"] and len(location) > 1:
        del location[1]  # which objective's settings pydantic chose is no part of the key
    key = ".".join(location)
    if error["type"] == "union_tag_invalid":
        wrong = str(error["ctx"]["tag"])
        return (
            f"{key}.name = {wrong!r}: one of {', '.join(OBJECTIVES)} is"
            f" expected{_nearest(wrong, list(OBJECTIVES))}"
        )
    if error["type"] == "union_tag_not_found":
        return f"{key} = {error['input']!r}: a table is expected, such as objective.name = 'awm'"
    if error["type"] == "extra_forbidden":
        allowed = _fields_at(tables)
        return (
            f"{key}: no such key{_nearest(location[-1], allowed)}; allowed here:"
            f" {', '.join(allowed)}"
        )
    if error["type"] == "missing":
        return f"{key}: required, but not given"
    message = error["msg"].removeprefix("Value error, ")
    if not location:
        return message
    choices = error.get("ctx", {}).get("expected")
    hint = (
        _nearest(
            str(error["input"]), [c.strip("' ") for c in choices.replace(" or ", ", ").split(",")]
        )
        if choices
        else ""
    )
    shown = repr(error["input"])
    return f"{key} = {shown if len(shown) <= 80 else shown[:77] + '...'}: {message}{hint}"


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _fields_at(location: Sequence[str]) -> list[str]:
    """The keys that the table at ``location`` may have."""
    if location[:1] == ["objective"] and location[1:] and location[1] in OBJECTIVES:
        return list(OBJECTIVES[location[1]].model_fields)
    model: type[BaseModel] = RunConfig
    for part in location:
        if part.isdigit() or part not in model.model_fields:
            continue
        model = _section_in(model.model_fields[part].annotation) or model
    return list(model.model_fields)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if (
        isinstance(annotation, type)
        and issubclass(annotation, BaseModel)
        and not isinstance(annotation, types.GenericAlias)
    ):
        return annotation
    for argument in typing.get_args(annotation):
        if found := _section_in(argument):
            return found
    return None
