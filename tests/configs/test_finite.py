"""Infinite values and NaN are refused for every number of a configuration."""

import math
import types
import typing
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from configs.load import ConfigError, load
from configs.objectives import SETTINGS
from configs.schema import RunConfig

SCORER = 'rewards.scorers=[{{name = "shapes", {field} = {value}}}]'
OWN_ACTORS = "services.scorers={{shapes = {{{field} = {value}}}}}"
INSIDE = {"rewards.scorers.": SCORER, "services.scorers.": OWN_ACTORS}
"""Tables within a list or under a name: how to set one of their fields."""


def parts_of(annotation: object) -> Iterator[object]:
    """Yield an annotation and its parts."""
    yield annotation
    for argument in typing.get_args(annotation):
        if not isinstance(annotation, types.GenericAlias) or argument is not Ellipsis:
            yield from parts_of(argument)


def floats(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of all float fields, except those of the objectives."""
    for name, field in model.model_fields.items():
        if f"{prefix}{name}" == "objective":
            continue
        parts = list(parts_of(field.annotation))
        if float in parts:
            yield f"{prefix}{name}"
        for part in parts:
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from floats(part, f"{prefix}{name}.")


KEYS = sorted(set(floats(RunConfig)))
OBJECTIVE_KEYS = [
    (name, key) for name, model in SETTINGS.items() for key in floats(model, "objective.")
]


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load("quickstart", overrides)
    (line,) = caught.value.lines
    return line


def overrides_of(key: str, value: str) -> str:
    for prefix, override in INSIDE.items():
        if key.startswith(prefix):
            return override.format(field=key.removeprefix(prefix), value=value)
    return f"{key}=[{value}, 0.9]" if key == "optimizer.betas" else f"{key}={value}"


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_every_number_is_finite(value):
    assert {"optimizer.lr", "services.rollout.deadline_s", "rewards.scorers.weight"} < set(KEYS)
    for key in KEYS:
        if key.startswith("rewards.evaluation_scorers."):
            continue  # the same table as for scorers
        line = refused(overrides_of(key, value))
        assert line.startswith(key.split(".")[0]), line
        assert line.endswith(": Input should be a finite number"), line
    for name, key in OBJECTIVE_KEYS:
        line = refused(f"objective={{name = '{name}'}}", f"{key}={value}")
        assert line == f"{key} = {float(value)!r}: Input should be a finite number"


def test_every_float_key_is_tested():
    """The test above sets a key for every float of a whole configuration."""
    plain = load("quickstart").model_dump()

    def walk(tree: object, prefix: str) -> Iterator[str]:
        if isinstance(tree, dict):
            for key, value in tree.items():
                yield from walk(value, f"{prefix}.{key}" if prefix else key)
        elif isinstance(tree, list | tuple):
            for value in tree:
                yield from walk(value, prefix)
        elif isinstance(tree, float):
            assert math.isfinite(tree)
            yield prefix

    tested = {*KEYS, *(key for _, key in OBJECTIVE_KEYS)}
    free = {key for key in walk(plain, "") if ".settings." in key}
    assert set(walk(plain, "")) - free <= tested
