"""Group existing run directories into cells, and check that their runs can be compared."""

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
"""Keys that must be equal in all cells, because scores cannot be compared otherwise."""


def group(directories: Sequence[Path]) -> dict[str, tuple[RunConfig, list[tuple[int, Path]]]]:
    """Group run directories by configuration: title -> (configuration, [(run seed, directory)]).

    A directory that contains runs without being one, such as a comparison's, represents those runs.

    Raises ConfigError if a directory has no run, if a configuration has the same seed twice, or if
    runs were evaluated differently or read different prompts from a file of the same name.
    """
    groups: dict[str, tuple[RunConfig, list[tuple[int, Path]]]] = {}
    paths = _run_directories(directories)
    for path in paths:
        config = RunDirectory(path).configuration()
        seed, key = config.seed, repr(sorted(_settings(config).items()))
        _, runs = groups.setdefault(key, (config, []))
        if duplicates := [directory for known, directory in runs if known == seed]:
            raise ConfigError(
                f"{path} and {duplicates[0]} have the same configuration and run seed: give one of"
                " them"
            )
        runs.append((seed, path))
    titles = titles_of([config for config, _ in groups.values()])
    named = dict(zip(titles, groups.values(), strict=True))
    check_alike({title: config for title, (config, _) in named.items()})
    check_prompts(paths)
    return {title: (config, sorted(runs)) for title, (config, runs) in named.items()}


def check_alike(configs: Mapping[str, RunConfig]) -> None:
    """Raise ConfigError unless all ``configs`` (name -> configuration) are evaluated alike."""
    (first, reference), *others = configs.items()
    for key in ALIKE:
        requested = attrgetter(key)(reference)
        for name, other in others:
            if (value := attrgetter(key)(other)) != requested:
                raise ConfigError(
                    f"{key}: {requested!r} in {first}, {value!r} in {name}: scores can be compared"
                    " only if both are evaluated in the same way"
                )


def check_prompts(directories: Iterable[Path]) -> None:
    """Raise ConfigError if two runs read different prompts from a file of the same name."""
    seen: dict[tuple[str, object], tuple[Path, str]] = {}
    for path in directories:
        run = read_run(path)
        for key in FILES:
            name, digest = run.setting(f"prompts.{key}"), run.prompts.get(key)
            if digest is None:
                continue
            other, seen_digest = seen.setdefault((key, name), (path, digest))
            if seen_digest != digest:
                raise ConfigError(
                    f"prompts.{key} = {name!r}: {path} and {other} used different prompts, so they"
                    " cannot be compared: give one of them"
                )


def settings_that_differ(configs: Mapping[str, RunConfig]) -> dict[str, dict[str, object]]:
    """Return key -> {name of the configuration: value} for every key whose values differ."""
    flat = {name: _settings(config) for name, config in configs.items()}
    return {
        key: {name: one.get(key) for name, one in flat.items()}
        for key in dict.fromkeys(key for one in flat.values() for key in one)
        if len({repr(one.get(key)) for one in flat.values()}) > 1
    }


def titles_of(configs: Sequence[RunConfig]) -> list[str]:
    """Return a distinct title per configuration, made of the settings that differ between them.

    Arm and objective come first, the other settings follow; equal titles are numbered.
    """
    flat = [_settings(config) for config in configs]
    differing = list(
        settings_that_differ({str(index): config for index, config in enumerate(configs)})
    )
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
    """Return dotted key -> value for every setting that can change results; a list is one value."""
    settings: dict[str, object] = {}

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
                settings[path] = value

    walk(config.model_dump(mode="json"), "")
    return settings


def _run_directories(directories: Sequence[Path]) -> list[Path]:
    runs: list[Path] = []
    for path in directories:
        inside = [path] if isfile(path / "config.json") else []
        with suppress(OSError):  # the path name is too long
            inside = inside or sorted(each.parent for each in path.glob("*/config.json"))
        if not inside:
            raise ConfigError(
                f"--runs {path}: no run found: give directories with a config.json, or their"
                " parent directory"
            )
        runs += inside
    return list(dict.fromkeys(each.resolve() for each in runs))
