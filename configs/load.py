"""Load a preset or a TOML file, with overrides, as a validated ``RunConfig``.

A file may build on layers, ``layers = ["models/shapes", "rewards/shapes"]``, which are read from
``configs/layers`` before it; later values win, key by key. ``--set a.b=c`` is applied last. Every
error is one line that names the key, the value, what is allowed and the nearest spelling.
"""

from __future__ import annotations

import copy
import tomllib
import typing
from collections.abc import Iterable, Sequence
from os.path import isfile  # Path.is_file raises for a name that is too long
from pathlib import Path
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from configs.aliases import current_key, refuse_duplicates, rename_old_keys
from configs.arms import Arm
from configs.lookup import suggestion
from configs.objectives import DEFAULT_OBJECTIVE, OBJECTIVES, SETTINGS
from configs.paths import is_file
from configs.schema import RunConfig
from configs.section import Tree

HERE = Path(__file__).parent
LAYERS = HERE / "layers"
PRESETS = HERE / "presets"
MODELS = (
    *("sd35_medium", "sd35_large", "flux1", "sana"),
    *("qwen_image", "z_image", "flux2", "flux2_klein"),
    *("wan_1_3b", "wan_14b", "wan22_5b", "wan22_a14b", "sana_video"),
)
REWARDS = ("imagereward", "clipscore", "pickscore", "hpsv2")
EDITORS = ("flux1_kontext", "qwen_image_edit")
"""Models that edit images. ``REWARDS`` do not see the source image, so a judge scores the edits."""
EDIT_REWARDS = ("vlm_edit",)
RECIPES = {
    "flow_grpo": "objectives/flow_grpo_preference",
    "dance_grpo": "objectives/dance_grpo_public",
    "awm": "objectives/awm_preference",
}
"""Layers of the other objectives of the paper's FLUX.1 table, which train on all samples, as the
arm ``diffusionnft`` does.
"""
REFERENCE = ("flux1", "sd35_large", "sana")
"""Models that the public reference code trains, with presets of its settings."""


class ConfigError(Exception):
    """Error in the user's configuration, with one line per error in ``lines``. Exit code 2."""

    def __init__(self, lines: str | Sequence[str]):
        self.lines = lines.splitlines() if isinstance(lines, str) else list(lines)
        super().__init__("\n".join(self.lines))


def preset_names() -> list[str]:
    """Return the names that ``load`` accepts: preset files, then composed presets."""
    return [*sorted(path.stem for path in PRESETS.glob("*.toml")), *_composed()]


def _composed() -> dict[str, Tree]:
    """Return the presets composed of layers, by name, as the trees of equivalent files.

    Names: ``[reference-]<model>-<arm>-<reward>`` and ``flux1-<objective>-<reward>``.
    """
    rows = [("", model, arm, arm, []) for model in MODELS for arm in get_args(Arm)]
    edits = ["recipes/editing"]
    rows += [("", model, arm, arm, edits) for model in EDITORS for arm in get_args(Arm)]
    rows += [("", "flux1", name, "diffusionnft", [layer]) for name, layer in RECIPES.items()]
    rows += [
        ("reference-", model, arm, arm, _reference(model, arm))
        for model in REFERENCE
        for arm in get_args(Arm)
    ]
    return {
        (name := f"{prefix}{model}-{method}-{reward}"): {
            "layers": [f"models/{model}", "recipes/full_size", *layers, f"rewards/{reward}"],
            "name": name,
            "arm": arm,
        }
        for prefix, model, method, arm, layers in rows
        for reward in rewards_of(model)
    }


def rewards_of(model: str) -> tuple[str, ...]:
    """Return the rewards that this model's presets are composed with."""
    return EDIT_REWARDS if model in EDITORS else REWARDS


def _reference(model: str, arm: str) -> list[str]:
    """Return the layers of the reference code's settings that exist for this model and arm."""
    parts = ("common", model, arm, f"{model}-{arm}")
    names = [f"reference/{part}" for part in parts]
    return [name for name in names if is_file(LAYERS / f"{name}.toml")]


def load(source: str, overrides: Iterable[str] = ()) -> RunConfig:
    """Return the configuration of ``source``, a preset name or TOML file, with ``--set`` overrides.

    Raises:
        ConfigError: the source is not found or not TOML, or a key or value is not allowed.
    """
    return parse(load_tree(source, overrides))


def load_tree(source: str, overrides: Iterable[str] = ()) -> Tree:
    """Return the plain tree that ``load`` validates. Raises ConfigError if it cannot be read."""
    tree = _with_layers(_tree(source), source)
    apply(tree, *overrides)
    return tree


def parse(tree: Tree) -> RunConfig:
    """Validate a plain tree, such as that of ``config.json``. Raises ConfigError if invalid."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        # pydantic also reports a tuple with an invalid item as too short, which adds nothing
        errors, wrong = error.errors(), {item["loc"][:-2] for item in error.errors()}
        relevant = [e for e in errors if e["type"] != "too_short" or e["loc"] not in wrong]
        raise ConfigError([_line(item) for item in relevant]) from None


def _tree(source: str) -> Tree:
    """Return the tree of a file, a preset file or a composed preset, before its layers are read."""
    if source.endswith(".toml") or "/" in source:
        path = Path(source)
        if not isfile(path):
            raise ConfigError(
                f"{source}: file not found; `sol-rl config --list` prints the presets"
            )
        return _read(path)
    if source in (composed := _composed()):
        return composed[source]
    path = PRESETS / f"{source}.toml"
    if not isfile(path):
        raise ConfigError(
            f"{source}: no preset of that name{suggestion(source, preset_names())}; `sol-rl"
            " config --list` prints all"
        )
    return _read(path)


def _read(path: Path) -> Tree:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    # ValueError: not TOML, not UTF-8, or a number with too many digits
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as TOML: {error}") from None
    return _current(tree, str(path))


def _current(tree: Tree, source: str) -> Tree:
    """Replace old names, before layers are merged: the later one must win under either name."""
    try:
        return rename_old_keys(tree)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    # caught here because this is the first recursion into the parsed tree
    except RecursionError:
        raise ConfigError(f"{source}: tables are nested too deeply") from None


def _with_layers(tree: Tree, source: str) -> Tree:
    merged: Tree = {}
    layers = tree.pop("layers", [])
    if not isinstance(layers, list) or not all(isinstance(name, str) for name in layers):
        raise ConfigError(
            f"{source}: layers = {layers!r}: a list of names under configs/layers is expected"
        )
    for name in layers:
        _merge(merged, layer(name, source))
    _merge(merged, tree)
    return merged


def layer(name: str, source: str) -> Tree:
    """Return the tree of the layer ``name``. Raises ConfigError, which names ``source``."""
    path = LAYERS / f"{name}.toml"
    if not isfile(path):
        known = [str(p.relative_to(LAYERS).with_suffix("")) for p in LAYERS.rglob("*.toml")]
        raise ConfigError(
            f"{source}: layers: unknown layer {name!r}{suggestion(name, known)}; available:"
            f" {', '.join(sorted(known))}"
        )
    return _read(path)


def merge_over(tree: Tree, above: Tree) -> None:
    """Merge ``above`` into ``tree``, key by key; values of ``above`` win.

    If ``above`` names another objective, the settings of the previous one are removed. Raises
    ConfigError if a key is given under its old and its new name.
    """
    above = _current(above, "set")
    old, new = tree.get("objective"), above.get("objective")
    if isinstance(old, dict) and isinstance(new, dict):
        name = old.get("name", DEFAULT_OBJECTIVE)
        if new.get("name", name) != name:
            tree["objective"] = {}
    _merge(tree, copy.deepcopy(above))


def _merge(into: Tree, tree: Tree) -> None:
    for key, value in tree.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def apply(tree: Tree, *overrides: str) -> None:
    """Set each ``a.b=c`` in the tree; ``c`` is read as a TOML value, or else as a plain string."""
    try:
        refuse_duplicates({override.partition("=")[0] for override in overrides})
    except ValueError as error:
        raise ConfigError(f"--set {error}") from None
    for override in overrides:
        _apply(tree, override)


def value_of(text: str) -> object:
    """Return ``text`` read as a TOML value, or else ``text`` itself.

    Raises ValueError or RecursionError for a value that Python cannot represent.
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _apply(tree: Tree, override: str) -> None:
    dotted, separator, text = override.partition("=")
    if not separator or not all(dotted.split(".")):
        raise ConfigError(f"--set {override}: expected key=value, such as explore.steps=4")
    try:
        value = value_of(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--set {dotted}: not readable as TOML: {error}") from None
    *tables, key = dotted.split(".")
    nested: Tree = {key: value}
    for part in reversed(tables):
        nested = {part: nested}
    nested = _current(nested, f"--set {override}")
    *parents, last = current_key(dotted).split(".")
    node = tree
    for parent in parents:
        node, nested = node.setdefault(parent, {}), nested[parent]
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override}: {parent} is a value, not a table")
    node[last] = nested[last]


def _line(error: ErrorDetails) -> str:
    """Return one pydantic error as one line: key = value, what is allowed, the nearest spelling."""
    location = [str(part) for part in error["loc"]]
    tables = location[:-1]
    if location[:1] == ["objective"] and len(location) > 1:
        del location[1]  # the objective's name, a tag that pydantic inserts, is not part of the key
    key = ".".join(location)
    if error["type"] == "union_tag_invalid":
        wrong = str(error.get("ctx", {}).get("tag"))
        return (
            f"{key}.name = {wrong!r}: one of {', '.join(OBJECTIVES)} is"
            f" expected{suggestion(wrong, OBJECTIVES)}"
        )
    if error["type"] == "union_tag_not_found":
        return f"{key} = {error['input']!r}: a table is expected, such as objective.name = 'awm'"
    if error["type"] == "extra_forbidden":
        allowed = _fields_at(tables)
        return (
            f"{key}: no such key{suggestion(location[-1], allowed)}; allowed here:"
            f" {', '.join(allowed)}"
        )
    if error["type"] == "missing":
        return f"{key}: required, but not given"
    message = error["msg"].removeprefix("Value error, ")
    if not location:
        return message
    choices = str(error.get("ctx", {}).get("expected", "")).replace(" or ", ", ").split(", ")
    hint = suggestion(str(error["input"]), [choice.strip("'") for choice in choices if choice])
    shown = repr(error["input"])
    return f"{key} = {shown if len(shown) <= 80 else shown[:77] + '...'}: {message}{hint}"


def _fields_at(location: Sequence[str]) -> list[str]:
    """Return the keys that are allowed in the table at ``location``."""
    if location[:1] == ["objective"] and location[1:] and location[1] in OBJECTIVES:
        return list(SETTINGS[location[1]].model_fields)
    model: type[BaseModel] = RunConfig
    for part in location:
        if part.isdigit() or part not in model.model_fields:
            continue
        model = _section_in(model.model_fields[part].annotation) or model
    return list(model.model_fields)


def _section_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in typing.get_args(annotation):
        if section := _section_in(argument):
            return section
    return None
