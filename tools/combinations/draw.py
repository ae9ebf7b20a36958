"""Random choice of the settings of a run, from the schema of the configuration."""

from __future__ import annotations

import copy
import json
import random
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from configs.load import ConfigError, apply, parse
from configs.objectives import SETTINGS
from configs.resume import OPERATIONAL, matches_key
from configs.schema import RunConfig
from configs.section import Section, Tree
from planning.preflight import check_model

LEFT_OUT = (
    # given by the tool and the tiny models
    *("name", "run_root", "iterations", "model.family", "model.height", "model.width"),
    *("model.frames", "model.guidance", "model.max_sequence_length", "objective.name"),
    *("explore.width", "evaluate.prompts", "optimizer.lr"),
    # end a run, or say where and how long actors work
    *("stop", "layout", "services.start_deadline_s", "services.wait_for_nodes_s"),
    *("services.node_silence_s", "services.autoscale"),
    *("logging.prometheus_port", "logging.report_every_s", "logging.wandb"),
)
"""Settings, or tables, that are not drawn."""
OF_SERVICES = ("share", "shard", "between_turns", "replicas", "threads", "regenerate_threads")
"""Settings of a service that are drawn. The others say where and how long actors work."""
BACKENDS = ("emulated_nvfp4", "fp8", "bf16", "fp32")
"""Values of ``explore.backend`` that run on a CPU."""
GPU_BACKENDS = ("auto", "torch_nvfp4", *BACKENDS)
"""Values of ``explore.backend`` on simulated GPUs."""
MORE: dict[str, list[Any]] = {
    "explore.modules_to_not_convert": [["*to_q"], ["*.0.*"], ["*"]],
    "lora.targets": [["to_q"], ["to_k", "to_v"], ["to_out.0"]],
    "guidance.negative_prompt": ["a blue cross"],
    "explore.height": [
        {"explore.height": height, "explore.width": width}
        for height, width in ((16, 16), (16, 32), (32, 32), (32, 64))
    ],
}
"""Values of settings that the schema does not give. A table has the values of several settings."""
SELDOM = ("explore.compile", "regenerate.compile", "optimizer.compile")
"""Settings that make a run take minutes. They are drawn in one of ``SELDOM_IN`` cases."""
SELDOM_IN = 8
NUMBERS = (0, 0.25, 0.5, 1, 2, 3, 5)
"""Values of numeric settings, of which those within a setting's limits are drawn."""
CHECKS = ("audit.identity_every", "rewards.deterministic")
"""Settings that change no result, but add metrics of what was checked."""
FEWEST, MOST = 6, 24
"""Numbers of settings that are tried for a run."""


def can_start(base: Tree, overrides: Sequence[str]) -> bool:
    """Return True if ``sol-rl train`` would start with ``base`` and ``overrides``."""
    try:
        check_model(configured(base, overrides))
    except ConfigError:
        return False
    return True


def drawn(
    rng: random.Random,
    base: Tree,
    is_valid: Callable[[Tree, Sequence[str]], bool] = can_start,
    gpus: bool = False,
) -> list[str]:
    """Return random overrides ``key=value`` with which ``base`` is a valid configuration.

    Its table ``objective`` is empty. They are drawn one after the other; one that contradicts those
    before it is left out. ``gpus``: for simulated GPUs, which cannot run compiled code.
    """
    firsts = {name: f"objective.name={json.dumps(name)}" for name in sorted(SETTINGS)}
    name = rng.choice([name for name, first in firsts.items() if is_valid(base, [first])])
    first, values = firsts[name], options(name)
    if gpus:
        values = {key: each for key, each in values.items() if key not in SELDOM}
        values["explore.backend"] = [*GPU_BACKENDS]
    number = rng.randint(FEWEST, min(MOST, len(values)))
    return [first, *_drawn_of(values, number, rng, base, [first], is_valid)]


def operational(rng: random.Random, base: Tree, settings: Sequence[str]) -> list[str]:
    """Return random overrides of settings that must not change the results of a run.

    They are those that a resumed run may change (``configs.resume.OPERATIONAL``).
    """
    values = {
        key: found
        for key, found in options(configured(base, settings).objective.name).items()
        if any(matches_key(pattern, key) for pattern in OPERATIONAL) and key not in CHECKS
    }
    return _drawn_of(values, rng.randint(0, len(values)), rng, base, settings, can_start)


def _drawn_of(
    values: Mapping[str, list[Any]],
    number: int,
    rng: random.Random,
    base: Tree,
    settings: Sequence[str],
    is_valid: Callable[[Tree, Sequence[str]], bool],
) -> list[str]:
    """Return overrides of ``number`` settings, less those that are not valid with the others."""
    kept: list[str] = []
    for key in rng.sample(sorted(values), number):
        value, seldom = rng.choice(values[key]), rng.randrange(SELDOM_IN)
        if key in SELDOM and seldom:
            continue
        several = value if isinstance(value, dict) else {key: value}
        overrides = [f"{name}={json.dumps(each)}" for name, each in several.items()]
        if is_valid(base, [*settings, *kept, *overrides]):
            kept += overrides
    return kept


def configured(base: Tree, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration ``base`` with ``overrides``. Raises ConfigError."""
    tree = copy.deepcopy(base)
    apply(tree, *overrides)
    return parse(tree)


def options(objective: str) -> dict[str, list[Any]]:
    """Return the values of each setting, by its dotted key, for runs with an objective."""
    tables = {name: field for name, field in RunConfig.model_fields.items() if name != "objective"}
    found = dict(_of_table("", tables))
    found |= _of_table("objective.", SETTINGS[objective].model_fields)
    found["explore.backend"] = list(BACKENDS)
    found |= MORE
    return {
        key: values
        for key, values in found.items()
        if values and not any(f"{key}.".startswith(f"{each}.") for each in LEFT_OUT)
    }


def _of_table(prefix: str, fields: Mapping[str, FieldInfo]) -> Iterator[tuple[str, list[Any]]]:
    for name, field in fields.items():
        key = f"{prefix}{name}"
        if key.startswith("services.") and key.count(".") > 1 and name not in OF_SERVICES:
            continue
        for kind in _alternatives(field.annotation):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from _of_table(f"{key}.", kind.model_fields)
        yield key, _values(field)


def _values(field: FieldInfo) -> list[Any]:
    """Return values of a setting that is a choice, a switch or a number; none of others."""
    values: list[Any] = []
    for kind in _alternatives(field.annotation):
        if get_origin(kind) is Literal:
            values += [value for value in get_args(kind) if value not in values]
        elif kind is bool:
            values += [True, False]
        elif kind in (int, float):
            values += [kind(n) for n in NUMBERS if kind(n) == n and _is_within(n, field)]
    return values


def _is_within(number: float, field: FieldInfo) -> bool:
    """Return True if a number is within the limits of a setting."""
    for limit in field.metadata:
        if isinstance(limit, annotated_types.Ge) and number < limit.ge:  # pyright: ignore
            return False
        if isinstance(limit, annotated_types.Gt) and number <= limit.gt:  # pyright: ignore
            return False
        if isinstance(limit, annotated_types.Le) and number > limit.le:  # pyright: ignore
            return False
        if isinstance(limit, annotated_types.Lt) and number >= limit.lt:  # pyright: ignore
            return False
        if isinstance(limit, annotated_types.MultipleOf):
            return False  # a size in pixels
    return True


def _alternatives(annotation: Any) -> list[Any]:
    """Return the members of a union, or the type itself."""
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return [kind for each in get_args(annotation) for kind in _alternatives(each)]
    if get_origin(annotation) is typing.Annotated:
        return _alternatives(get_args(annotation)[0])
    return [annotation]
