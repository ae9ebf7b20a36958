"""``sol-rl tune``: find the explore settings with the most contrast for their cost."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from analysis.measuring import Say, backends, choose_prompts, measurement_context
from analysis.tune.drawing import drawing
from analysis.tune.measure import Measurements, measure
from analysis.tune.rows import Row, TuneOptions, choose, make_rows, preview_kind
from analysis.tune.settings import Setting, grid, seeds_after_pruning
from configs.load import ConfigError, apply, parse
from configs.schema import RunConfig
from configs.section import Tree
from configs.toml_text import to_toml
from planning.preflight import check_model
from records.atomic import write_json, write_text
from records.rundir import output_errors, versions
from records.tables import markdown


def run(config: RunConfig, tree: Tree, requested: TuneOptions, out: Path, say: Say) -> list[str]:
    """Measure, write tune.json, tune.svg and tuned.toml, and return the table and the conclusion.

    ``tree`` is the plain configuration that ``tuned.toml`` is derived from. Raises ConfigError if
    the settings cannot be measured, and RunFailed if an image cannot be scored or a file cannot be
    written.
    """
    if config.arm != "sol_rl":
        raise ConfigError(f"tune: arm {config.arm!r} does not explore and regenerate: use 'sol_rl'")
    if config.explore.paths:
        raise ConfigError(
            "tune: explore.paths: previews of paths are not measured: use explore.paths = false"
        )
    check_model(config, requested.steps)
    explore = config.explore
    resolved = backends(requested.backends or (explore.backend,), say)
    (own_backend,) = backends((explore.backend,))
    keep, size = config.selection.keep, requested.sizes[0]
    own = Setting(own_backend, explore.steps, explore.pool_size, keep, size)
    settings = _settings(requested, list(resolved), own)
    configs = {setting: _parsed(tree, setting) for setting in settings}
    resolved |= backends((own_backend,))
    kinds = {preview_kind(setting) for setting in settings} | {
        (*preview_kind(own)[:3], stop_after) for stop_after in requested.prune
    }
    sizes = {setting.size: config for setting, config in configs.items()}
    prompts = choose_prompts(config, requested.prompts)
    with measurement_context(config, requested.threads, out, "a seed without a reward has no rank"):
        measured = measure(config, prompts, requested.seeds, resolved, sizes, kinds, say)
        facts = {"threads": torch.get_num_threads(), "versions": versions()}
        rows = make_rows(measured, configs, own, requested, config.seed)
    chosen = choose(rows, requested.budget)
    with output_errors(out):
        _write(out, rows, chosen, own, requested, measured, facts, tree)
    return [
        *table(rows, requested),
        "",
        *conclusion(rows, chosen, own, requested),
        f"written: {out / 'tuned.toml'}, tune.json, tune.svg",
    ]


def _settings(requested: TuneOptions, names: Sequence[str], own: Setting) -> list[Setting]:
    """Return the settings to measure, that of the configuration first.

    Raises ConfigError if one of them is impossible.
    """
    pools = requested.pools or tuple(
        dict.fromkeys([requested.seeds // 2, 3 * requested.seeds // 4, requested.seeds, own.pool])
    )
    keeps = requested.keeps or (own.keep,)
    if too_large := [pool for pool in (*pools, own.pool) if pool > requested.seeds]:
        raise ConfigError(
            f"--seeds {requested.seeds}: a pool of {too_large[0]} needs that many seeds"
        )
    if invalid_keeps := [keep for keep in keeps if keep % 2 or keep < 2]:
        raise ConfigError(
            f"--keep {invalid_keeps[0]}: equal numbers of best and worst seeds are kept: give an"
            " even number"
        )
    if invalid_steps := [
        stop_after for stop_after in requested.prune if not 0 < stop_after < own.steps
    ]:
        raise ConfigError(
            f"--prune {invalid_steps[0]}: expected a step before the last of {own.steps}"
        )
    if requested.prune and (requested.by != "seconds" or seeds_after_pruning(own.pool) < own.keep):
        raise ConfigError(
            f"--prune reports seconds, for the {seeds_after_pruning(own.pool)} of {own.pool} seeds"
            f" that continue: leave out --by operations, and explore at least {2 * own.keep}"
        )
    combinations = grid(names, requested.steps, pools, keeps, requested.sizes)
    return list(dict.fromkeys([own, *combinations]))


def _parsed(tree: Tree, setting: Setting) -> RunConfig:
    changed = copy.deepcopy(tree)
    apply(changed, *setting.changes())
    return parse(changed)


def table(rows: Sequence[Row], requested: TuneOptions) -> list[str]:
    """Format the rows, highest strength per cost first, marking the configuration's own setting."""
    unit = "seconds" if requested.by == "seconds" else f"operations at {requested.ratio:g}x"
    head = ["setting", f"cost ({unit})", "contrast", "strength, over own", "strength per cost"]
    own = rows[0]
    body = [
        [
            f"{row.label}{' (own)' if row is own else ''}",
            f"{row.cost:.3f}",
            f"{row.contrast.mean:.4f} [{row.contrast.low:.4f}, {row.contrast.high:.4f}]",
            f"{1 + row.more.mean:.3f} [{1 + row.more.low:.3f}, {1 + row.more.high:.3f}]",
            f"{row.per_cost / own.per_cost:.3f}",
        ]
        for row in sorted(rows, key=lambda row: -row.per_cost)
    ]
    return [
        f"{requested.prompts} prompts x {requested.seeds} seeds; [95 % confidence, bootstrap over"
        " prompts]; cost: exploring, regenerating and training, relative to the configuration;"
        " strength: contrast times sqrt(keep)",
        "",
        *markdown(head, body),
    ]


PRUNED_COST, PRUNED_CONTRAST = 0.75, 0.97
"""Pruning pays if exploring takes at most this share of its time and keeps at least this share of
the contrast. To prune is to drop half of a pool early.
"""


def conclusion(
    rows: Sequence[Row], chosen: Row | None, own: Setting, requested: TuneOptions
) -> list[str]:
    """Describe the chosen setting, its certainty, and for each pruned row if pruning pays."""
    sentences = []
    if chosen is None:
        lowest = min(row.cost for row in rows if row.pruned is None)
        sentences.append(
            f"no setting costs at most {requested.budget:g} of the configuration's cost; the"
            f" minimum is {lowest:.3f}: tuned.toml is the unchanged configuration"
        )
    elif chosen.setting == own:
        sentences.append("the configuration's own setting is the best within the budget")
    else:
        direction = "more" if chosen.more.low > 0 else "less" if chosen.more.high < 0 else None
        sentences.append(
            f"best within the budget: {chosen.label}: {chosen.cost:.3f} of the cost,"
            f" {1 + chosen.more.mean:.3f} of the strength"
            + ("" if direction else " (no significant difference: the interval contains 1)")
        )
    for row in rows:
        if row.pruned is not None:
            exploring, kept = row.pruned.exploring, 1 + row.more.mean
            pays = exploring <= PRUNED_COST and kept >= PRUNED_CONTRAST
            sentences.append(
                f"half of the pool dropped after step {row.pruned.after}: {exploring:.3f} of the"
                f" seconds of exploring, {kept:.3f} of the contrast:"
                f" {'it pays' if pays else 'it does not pay'} ({PRUNED_COST:g} for"
                f" {PRUNED_CONTRAST:g} would)"
            )
    return sentences


def _write(
    out: Path,
    rows: Sequence[Row],
    chosen: Row | None,
    own: Setting,
    requested: TuneOptions,
    measured: Measurements,
    facts: Tree,
    tree: Tree,
) -> None:
    write_json(
        out / "tune.json",
        facts
        | {
            "wanted": dataclasses.asdict(requested),
            "own": dataclasses.asdict(own),
            "chosen": None if chosen is None else chosen.label,
            "seconds": {
                "truth": measured.truth_s,
                "update": measured.update_s,
                "previews": [[*kind, value] for kind, value in measured.seconds.items()],
            },
            "rows": [dataclasses.asdict(row) | {"label": row.label} for row in rows],
        },
    )
    points = [(row.label, row.cost, row.strength, row is chosen) for row in rows]
    write_text(out / "tune.svg", drawing(points, requested.budget, requested.by))
    changed = copy.deepcopy(tree)
    if chosen is not None:
        apply(changed, *chosen.setting.changes())
    write_text(out / "tuned.toml", to_toml(changed))
