"""``sol-rl compare``: train and compare cells on equal prompts, initial noises and run seeds.

Child processes train, one at a time. This process starts them, reads their run directories, and
writes ``compare.json`` and ``compare.html``, even if some runs failed.
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
from analysis.compare.runner import Say, run_all
from analysis.compare.table import lines, tables
from configs.load import ConfigError, parse
from configs.paths import is_dir
from configs.schema import RunConfig
from records.errors import RunFailed
from records.rundir import make_output, output_errors, versions, write_json, write_text

REPORT, NUMBERS = "compare.html", "compare.json"


def compare(request: Request, out: Path | None, say: Say) -> list[str]:
    """Run what is not finished and return the lines of the tables; ``say`` receives progress lines.

    Raises:
        ConfigError: the request is invalid and nothing was started, or a prompt file changed
            between the runs.
        RunFailed: some runs failed; the tables of the others were passed to ``say`` and written.
        Stopped: a signal was received; the same command continues the comparison.
    """
    comparison = read_comparison(request)
    out = (out or comparison.root / f"{comparison.name}-compare").absolute()
    configs = {c.title: parse(c.tree_of(comparison.seeds[0], out)) for c in comparison.running}
    for cell in comparison.cells:
        if cell.refused:
            say(f"refused: {cell.title}: {cell.refused}")
    ended = run_all(comparison, out, say)
    check_prompts(run.path for run in ended if is_dir(run.path))
    runs: dict[str, list[Run]] = {cell.name: [] for cell in comparison.cells}
    for run in ended:
        runs[run.cell].append(measure(run.path, run.seed, run.why))
    results = summarise(
        [(c.name, c.title, c.refused, runs[c.name]) for c in comparison.cells], comparison.baseline
    )
    by_name = {c.name: configs[c.title] for c in comparison.running}
    settings = settings_that_differ(configs)
    operation_costs = counted(by_name, results, comparison.baseline, comparison.operations)
    text = _write(out, comparison.name, comparison.baseline, results, settings, operation_costs)
    if failed := [run for run in ended if run.why is not None]:
        for line in text:
            say(line)
        raise RunFailed(
            f"{len(failed)} of {len(ended)} runs did not finish ({failed[0].path.name}:"
            f" {failed[0].why}): fix the cause, and run the same command again for the missing runs"
        )
    return text


def compare_existing(
    directories: Sequence[Path],
    baseline: str | None,
    out: Path | None,
    operations: tuple[float, ...] = (),
) -> list[str]:
    """Return the tables of existing runs; raise ConfigError if they cannot be compared."""
    check_ratios(operations)
    groups = group(directories)
    names = list(groups)
    if baseline is not None and baseline not in names:
        raise ConfigError(f"--baseline {baseline}: unknown cell; available: {', '.join(names)}")
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
    operation_costs = counted(configs, results, baseline, operations)
    settings = settings_that_differ(configs)
    return _write(out, out.name, baseline, results, settings, operation_costs)


def counted(
    configs: Mapping[str, RunConfig],
    results: Sequence[Result],
    baseline: str,
    ratios: Sequence[float],
) -> dict[str, list[Cost]]:
    """Return cell name -> one cost per ratio; without ratios, nothing is counted.

    Raises ConfigError if a model's operations cannot be counted.
    """
    if not ratios:
        return {}
    try:
        operations = {name: operations_of(config) for name, config in configs.items()}
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(str(error)) from None
    return costs(results, baseline, operations, ratios)


def _write(
    out: Path,
    name: str,
    baseline: str,
    results: Sequence[Result],
    settings: dict[str, dict[str, object]],
    costs: dict[str, list[Cost]],
) -> list[str]:
    """Write compare.json and compare.html; return the lines for the terminal."""
    result_tables, notes = tables(results, baseline, costs), remarks(results, baseline)
    numbers = {
        "name": name,
        "baseline": baseline,
        "versions": versions(),
        "settings": settings,
        "remarks": notes,
        "cells": [
            asdict(result) | {"operations": list(map(asdict, costs.get(result.name, ())))}
            for result in results
        ],
    }
    with output_errors(out):
        write_json(out / NUMBERS, _plain(numbers))
        write_text(out / REPORT, render(name, results, result_tables, notes, settings, costs))
    return [*lines(result_tables, notes), "", f"written: {out / REPORT}, {NUMBERS}"]


def _plain(value: object) -> object:
    """Convert ``value`` for JSON: non-finite numbers to null, keys and paths to text."""
    if isinstance(value, dict):
        return {
            f"{key:g}" if isinstance(key, float) else str(key): _plain(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
