"""``sol-rl compare``: cells on equal prompts, initial noise and run seeds.

Training is done by child processes, one at a time; this one starts them, reads their run
directories, and writes ``compare.json`` and ``compare.html``, also where runs failed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from analysis.compare.cells import Request, read_comparison
from analysis.compare.data import Result, Run, measure, remarks, summarise
from analysis.compare.groups import check_prompts, group, settings_that_differ
from analysis.compare.operations import Cost, costs, operations_of
from analysis.compare.page import render
from analysis.compare.request import check_ratios
from analysis.compare.running import Say, run_all
from analysis.compare.table import lines, tables
from configs.load import ConfigError, parse
from configs.schema import RunConfig
from records.errors import RunFailed
from records.rundir import make_output, versions, write_json, write_text, writing

REPORT, NUMBERS = "compare.html", "compare.json"


def compare(request: Request, out: Path | None, say: Say) -> list[str]:
    """Run what is not finished and return the lines of the tables; ``say`` is told the progress.

    Raises:
        ConfigError: the request is wrong, and nothing was started; or a prompt file became another
            between the runs.
        RunFailed: some runs failed; the tables of the others were said and written.
        Stopped: a signal came; the same command continues.
    """
    comparison = read_comparison(request)
    out = (out or comparison.root / f"{comparison.name}-compare").absolute()
    for cell in comparison.cells:
        if cell.refused:
            say(f"refused: {cell.title}: {cell.refused}")
    ended = run_all(comparison, out, say)
    check_prompts(each.path for each in ended if each.path.is_dir())
    runs: dict[str, list[Run]] = {cell.name: [] for cell in comparison.cells}
    for each in ended:
        runs[each.cell].append(measure(each.path, each.seed, each.why))
    results = summarise(
        [(c.name, c.title, c.refused, runs[c.name]) for c in comparison.cells], comparison.baseline
    )
    configs = {c.title: parse(c.tree_of(comparison.seeds[0], out)) for c in comparison.running}
    by_name = {c.name: configs[c.title] for c in comparison.running}
    settings = settings_that_differ(configs)
    found = counted(by_name, results, comparison.baseline, comparison.operations)
    text = _write(out, comparison.name, comparison.baseline, results, settings, found)
    if failed := [each for each in ended if each.why is not None]:
        for line in text:
            say(line)
        raise RunFailed(
            f"{len(failed)} of {len(ended)} runs did not come to their end ({failed[0].path.name}:"
            f" {failed[0].why}): fix that, and the same command runs what is missing"
        )
    return text


def compare_existing(
    directories: Sequence[Path],
    baseline: str | None,
    out: Path | None,
    operations: tuple[float, ...] = (),
) -> list[str]:
    """The tables of runs that are there. Raises ConfigError for what cannot be compared."""
    check_ratios(operations)
    groups = group(directories)
    names = list(groups)
    if baseline is not None and baseline not in names:
        raise ConfigError(f"--baseline {baseline}: no such cell; there are: {', '.join(names)}")
    baseline = baseline or names[0]
    results = summarise(
        [
            (name, name, None, [measure(path, seed) for seed, path in runs])
            for name, (_, runs) in groups.items()
        ],
        baseline,
    )
    configs = {name: config for name, (config, _) in groups.items()}
    out = out or directories[0].absolute().parent / "compare"
    make_output(out)
    found = counted(configs, results, baseline, operations)
    settings = settings_that_differ(configs)
    return _write(out, out.name, baseline, results, settings, found)


def counted(
    configs: Mapping[str, RunConfig],
    results: Sequence[Result],
    baseline: str,
    ratios: Sequence[float],
) -> dict[str, list[Cost]]:
    """Costs by cell, a cost per ratio; nothing is counted without ratios. Raises ConfigError."""
    if not ratios:
        return {}
    try:
        found = {name: operations_of(config) for name, config in configs.items()}
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(str(error)) from None
    return costs(results, baseline, found, ratios)


def _write(
    out: Path,
    name: str,
    baseline: str,
    results: Sequence[Result],
    settings: dict[str, dict[str, object]],
    costs: dict[str, list[Cost]],
) -> list[str]:
    """compare.json and compare.html; returns the lines for people."""
    found, said = tables(results, baseline, costs), remarks(results, baseline)
    numbers = {
        "name": name,
        "baseline": baseline,
        "versions": versions(),
        "settings": settings,
        "remarks": said,
        "cells": [
            asdict(result) | {"operations": list(map(asdict, costs.get(result.name, ())))}
            for result in results
        ],
    }
    with writing(out):
        write_json(out / NUMBERS, _plain(numbers))
        write_text(out / REPORT, render(name, results, found, said, settings, costs))
    return [*lines(found, said), "", f"written: {out / REPORT}, {NUMBERS}"]


def _plain(value: object) -> object:
    """``value`` for JSON: null for a number that is not finite, keys and paths as text."""
    if isinstance(value, dict):
        return {
            f"{key:g}" if isinstance(key, float) else str(key): _plain(each)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
