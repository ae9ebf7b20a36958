"""Run directories as cells of a comparison, and what runs must have in common to be compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from os.path import isfile
from pathlib import Path

from analysis.report.data import read_run
from configs.load import ConfigError
from configs.prompts import FILES
from configs.resume import OPERATIONAL, matches_key
from configs.schema import RunConfig
from records.rundir import RunDirectory

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


def group(directories: Sequence[Path]) -> dict[str, tuple[RunConfig, list[tuple[int, Path]]]]:
    """Run directories by configuration: title -> (configuration, [(run seed, directory)]).

    A directory that is not a run but holds some, as a comparison's does, stands for them. Raises
    ConfigError for a directory without a run, a seed that comes twice, and runs that were not
    evaluated alike or had other prompts under the same name.
    """
    groups: dict[str, tuple[RunConfig, list[tuple[int, Path]]]] = {}
    paths = _run_directories(directories)
    for path in paths:
        config = RunDirectory(path).configuration()
        seed, key = config.seed, repr(sorted(_settings(config).items()))
        _, runs = groups.setdefault(key, (config, []))
        if other := [each for known, each in runs if known == seed]:
            raise ConfigError(
                f"{path} and {other[0]} are the same configuration and run seed: give one of"
                " the two"
            )
        runs.append((seed, path))
    titles = titles_of([config for config, _ in groups.values()])
    named = dict(zip(titles, groups.values(), strict=True))
    check_alike({title: config for title, (config, _) in named.items()})
    check_prompts(paths)
    return {title: (config, sorted(runs)) for title, (config, runs) in named.items()}


def check_alike(configs: Mapping[str, RunConfig]) -> None:
    """Raises ConfigError unless all ``configs``, by their names, are evaluated alike."""
    (first, one), *others = configs.items()
    for key in ALIKE:
        wanted = attrgetter(key)(one)
        for name, other in others:
            if (found := attrgetter(key)(other)) != wanted:
                raise ConfigError(
                    f"{key}: {wanted!r} in {first}, {found!r} in {name}: scores can be compared"
                    " only when both are evaluated alike"
                )


def check_prompts(directories: Iterable[Path]) -> None:
    """Raises ConfigError where two runs read other prompts in a file of the same name."""
    seen: dict[tuple[str, object], tuple[Path, str]] = {}
    for path in directories:
        run = read_run(path)
        for key in FILES:
            name, found = run.setting(f"prompts.{key}"), run.prompts.get(key)
            if found is None:
                continue
            other, theirs = seen.setdefault((key, name), (path, found))
            if theirs != found:
                raise ConfigError(
                    f"prompts.{key} = {name!r}: {path} and {other} read other prompts there, so"
                    " they cannot be compared: give one of the two"
                )


def settings_that_differ(configs: Mapping[str, RunConfig]) -> dict[str, dict[str, object]]:
    """key -> value by the name of the configuration, for every key that is not the same in all."""
    flat = {name: _settings(config) for name, config in configs.items()}
    return {
        key: {name: one.get(key) for name, one in flat.items()}
        for key in dict.fromkeys(key for one in flat.values() for key in one)
        if len({repr(one.get(key)) for one in flat.values()}) > 1
    }


def titles_of(configs: Sequence[RunConfig]) -> list[str]:
    """Arm and objective where they differ, and every other setting that does."""
    flat = [_settings(config) for config in configs]
    differing = list(settings_that_differ({str(at): config for at, config in enumerate(configs)}))
    objectives = "objective.name" in differing
    shown = [
        key
        for key in differing
        if key not in ("arm", "objective.name")
        and not (objectives and key.startswith("objective."))
    ]
    titles = []
    for config, one in zip(configs, flat, strict=True):
        head = [config.arm] if "arm" in differing or not objectives else []
        head += [config.objective.name] if objectives else []
        titles.append(" · ".join([*head, *(f"{key} = {one.get(key)}" for key in shown)]))
    return [
        title if titles.count(title) == 1 else f"{title} ({number})"
        for number, title in enumerate(titles, 1)
    ]


def _settings(config: RunConfig) -> dict[str, object]:
    """Every setting that can change results, by dotted key; a list is one value."""
    found: dict[str, object] = {}

    def walk(tree: Mapping[str, object], prefix: str) -> None:
        for key, value in tree.items():
            path = f"{prefix}{key}"
            if path in ("seed", "name") or any(
                matches_key(pattern, path) for pattern in OPERATIONAL
            ):
                continue
            if isinstance(value, dict) and value:
                walk(value, f"{path}.")
            else:
                found[path] = value

    walk(config.model_dump(mode="json"), "")
    return found


def _run_directories(directories: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in directories:
        inside = [path] if isfile(path / "config.json") else []
        with suppress(OSError):  # a name that is too long
            inside = inside or sorted(each.parent for each in path.glob("*/config.json"))
        if not inside:
            raise ConfigError(
                f"--runs {path}: no run here: give directories with a config.json, or one that"
                " holds such"
            )
        found += inside
    return list(dict.fromkeys(each.resolve() for each in found))
