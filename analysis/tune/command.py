"""``sol-rl tune``: which exploring settings find most for what they cost, from one measurement."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from analysis.compare.operations import operations_of
from analysis.compare.running import to_toml
from analysis.fidelity.measure import backends, choose_prompts, hide_loading_bars
from analysis.tune.drawing import drawing
from analysis.tune.measure import Found, Kind, Measuring, Say, Size
from analysis.tune.settings import Setting, contrasts, grid, left_of, pruned_contrasts, strength
from configs.load import ConfigError, apply, parse
from configs.schema import RunConfig
from configs.section import Tree
from learner.fidelity import Estimate, estimates
from planning.preflight import check_model
from policy.device import threads
from records.atomic import write_json, write_text
from records.errors import RunFailed
from records.rundir import versions
from records.tables import markdown
from rewards.base import ScorerError, ScorerSetupError


@dataclass(frozen=True)
class Wanted:
    """What is tried. ``budget``: a setting may cost so much of what the configuration's costs;
    ``sizes``: the configuration's own first; ``prune``: steps after which half of a pool could be
    dropped.
    """

    budget: float = 1.0
    by: Literal["seconds", "operations"] = "seconds"
    ratio: float = 4.0
    prompts: int = 16
    seeds: int = 96
    steps: tuple[int, ...] = (4, 6, 8)
    pools: tuple[int, ...] = ()
    keeps: tuple[int, ...] = ()
    backends: tuple[str, ...] = ()
    sizes: tuple[Size, ...] = (None,)
    prune: tuple[int, ...] = ()
    threads: int | None = None


@dataclass(frozen=True)
class Pruned:
    """Half of the pool is dropped ``after`` a step; seconds of ``exploring`` over those without."""

    after: int
    exploring: float


@dataclass(frozen=True)
class Row:
    """A setting: its cost over the configuration's own, what it finds, and how much more strength
    that is than the own setting's, over that, paired by prompt.
    """

    setting: Setting
    cost: float
    contrast: Estimate
    strength: Estimate
    more: Estimate
    pruned: Pruned | None = None

    @property
    def label(self) -> str:
        """For people."""
        after = "" if self.pruned is None else f", half dropped after step {self.pruned.after}"
        return f"{self.setting.label}{after}"

    @property
    def per_cost(self) -> float:
        """Strength per cost."""
        return self.strength.mean / self.cost


def run(config: RunConfig, tree: Tree, wanted: Wanted, out: Path, say: Say) -> list[str]:
    """Measure, write tune.json, tune.svg and tuned.toml; returns the table and what it comes to.

    ``tree`` is the plain configuration that ``tuned.toml`` changes. Raises ConfigError for what
    cannot be measured, RunFailed when an image cannot be scored or a file not written.
    """
    if config.arm != "sol_rl":
        raise ConfigError(f"tune: arm {config.arm!r} does not explore and regenerate: use 'sol_rl'")
    check_model(config)
    own_name = config.explore.backend
    found = backends(wanted.backends or (own_name,), say)
    own_backend = next(iter(backends((own_name,))))
    own = Setting(
        own_backend,
        config.explore.steps,
        config.explore.pool_size,
        config.selection.keep,
        wanted.sizes[0],
    )
    settings = _settings(config, wanted, list(found), own)
    configs = {setting: _parsed(tree, setting) for setting in settings}
    found |= backends((own_backend,))
    kinds = {_kind(setting) for setting in settings} | {
        (*_kind(own)[:3], upto) for upto in wanted.prune
    }
    sizes = {setting.size: config for setting, config in configs.items()}
    prompts = choose_prompts(config, wanted.prompts)
    try:
        out.mkdir(parents=True, exist_ok=True)
        hide_loading_bars()
        with threads(wanted.threads or config.services.rollout.threads):
            measured = Measuring(config, prompts, wanted.seeds, say).run(found, sizes, kinds)
            facts = {"threads": torch.get_num_threads(), "versions": versions()}
        rows = rows_of(measured, configs, own, wanted, config.seed)
        chosen = choose(rows, wanted.budget)
        _write(out, rows, chosen, own, wanted, measured, facts, tree)
    except ScorerError as error:
        raise RunFailed(f"{error}; a seed without a reward has no rank") from None
    except (FileNotFoundError, ScorerSetupError) as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise RunFailed(f"{out}: {error.strerror or error}: give another directory") from None
    return [
        *table(rows, wanted),
        "",
        *conclusion(rows, chosen, own, wanted),
        f"written: {out / 'tuned.toml'}, tune.json, tune.svg",
    ]


def _settings(
    config: RunConfig, wanted: Wanted, names: Sequence[str], own: Setting
) -> list[Setting]:
    """The own setting first. Raises ConfigError where nothing can be measured of them."""
    pools = wanted.pools or tuple(
        dict.fromkeys([wanted.seeds // 2, 3 * wanted.seeds // 4, wanted.seeds, own.pool])
    )
    keeps = wanted.keeps or (own.keep,)
    if most := [pool for pool in (*pools, own.pool) if pool > wanted.seeds]:
        raise ConfigError(f"--seeds {wanted.seeds}: a pool of {most[0]} needs as many")
    if odd := [keep for keep in keeps if keep % 2 or keep < 2]:
        raise ConfigError(f"--keep {odd[0]}: as many best as worst are kept: give an even number")
    if wrong := [upto for upto in wanted.prune if not 0 < upto < own.steps]:
        raise ConfigError(f"--prune {wrong[0]}: a step of the {own.steps} but the last is expected")
    if wanted.prune and (wanted.by != "seconds" or left_of(own.pool) < own.keep):
        raise ConfigError(
            f"--prune: seconds are told, of the {left_of(own.pool)} of {own.pool} seeds that go on:"
            f" leave --by operations out, and explore at least {2 * own.keep}"
        )
    found = grid(names, wanted.steps, pools, keeps, wanted.sizes)
    return list(dict.fromkeys([own, *found]))


def _parsed(tree: Tree, setting: Setting) -> RunConfig:
    changed = copy.deepcopy(tree)
    apply(changed, *setting.changes())
    return parse(changed)


def _kind(setting: Setting) -> Kind:
    return setting.backend, setting.steps, setting.size, None


def rows_of(
    found: Found, configs: Mapping[Setting, RunConfig], own: Setting, wanted: Wanted, seed: int
) -> list[Row]:
    """A row for each setting, the own one first, then its pruned forms."""
    costs = {setting: _cost(found, setting, configs[setting], wanted) for setting in configs}
    columns = {
        setting: contrasts(found.rewards[_kind(setting)], found.truth, setting.pool, setting.keep)
        for setting in configs
    }
    base = strength(columns[own], own.keep)

    def row(setting: Setting, cost: float, column: np.ndarray, pruned: Pruned | None = None) -> Row:
        mine = strength(column, setting.keep)
        more = (mine - base) / base.mean()
        parts = estimates({"contrast": column, "strength": mine, "more": more}, seed)
        return Row(
            setting, cost / costs[own], parts["contrast"], parts["strength"], parts["more"], pruned
        )

    rows = [row(setting, costs[setting], column) for setting, column in columns.items()]
    if wanted.by == "seconds":
        for upto in wanted.prune:
            kind: Kind = (*_kind(own)[:3], upto)
            column = pruned_contrasts(
                found.rewards[kind], found.rewards[_kind(own)], found.truth, own.pool, own.keep
            )
            saved, whole = _pruned_saving(found, own, upto), found.seconds[_kind(own)]
            pruned = Pruned(upto, 1 - saved / whole)
            rows.append(row(own, costs[own] - own.pool * saved, column, pruned))
    return rows


def _cost(found: Found, setting: Setting, config: RunConfig, wanted: Wanted) -> float:
    """Of exploring, regenerating and training on a prompt: seconds here, or operations."""
    if wanted.by == "operations":
        return operations_of(config).at(wanted.ratio) / config.prompts.per_iteration
    kept = found.truth_s + found.update_s
    return setting.pool * found.seconds[_kind(setting)] + setting.keep * kept


def _pruned_saving(found: Found, own: Setting, upto: int) -> float:
    """Seconds per seed of the pool: half of them are spared the other steps, but all previews of
    step ``upto`` are decoded and scored beside the finished ones.

    A preview of s steps takes s d + e seconds, d for a step and e for decoding and scoring.
    """
    early, last = found.seconds[(*_kind(own)[:3], upto)], found.seconds[_kind(own)]
    step = (last - early) / (own.steps - upto)
    finish = max(0.0, early - upto * step)
    return last - (early + ((own.steps - upto) * step + finish) / 2)


def choose(rows: Sequence[Row], budget: float) -> Row | None:
    """The row with most strength at a cost of at most ``budget``; None: none is so cheap. Pruned
    forms are told and not chosen: no setting explores so.
    """
    possible = [row for row in rows if row.pruned is None and row.cost <= budget * (1 + 1e-9)]
    return max(possible, key=lambda row: row.strength.mean, default=None)


def table(rows: Sequence[Row], wanted: Wanted) -> list[str]:
    """The rows for people, most strength per cost first; the own one is marked."""
    unit = "seconds" if wanted.by == "seconds" else f"operations at {wanted.ratio:g}x"
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
        f"{wanted.prompts} prompts x {wanted.seeds} seeds; [95 % confidence, bootstrap over"
        " prompts]; cost: exploring, regenerating and training, over the configuration's own;"
        " strength: contrast times sqrt(keep)",
        "",
        *markdown(head, body),
    ]


PRUNED_COST, PRUNED_CONTRAST = 0.75, 0.97
"""Dropping half of a pool early pays where exploring takes this share of its seconds, or less, and
this share of the contrast, or more, is found.
"""


def conclusion(rows: Sequence[Row], chosen: Row | None, own: Setting, wanted: Wanted) -> list[str]:
    """What was chosen and how sure that is, and whether pruning pays."""
    said = []
    if chosen is None:
        least = min(row.cost for row in rows if row.pruned is None)
        said.append(
            f"nothing costs at most {wanted.budget:g} of the configuration's own; the least is"
            f" {least:.3f}: tuned.toml is the configuration as it was"
        )
    elif chosen.setting == own:
        said.append("the configuration's own setting finds most within the budget")
    else:
        sure = "more" if chosen.more.low > 0 else "less" if chosen.more.high < 0 else None
        said.append(
            f"most within the budget: {chosen.label}: {chosen.cost:.3f} of the cost,"
            f" {1 + chosen.more.mean:.3f} of the strength"
            + ("" if sure else " (no difference is seen: the interval holds 1)")
        )
    for row in rows:
        if row.pruned is not None:
            exploring, kept = row.pruned.exploring, 1 + row.more.mean
            pays = exploring <= PRUNED_COST and kept >= PRUNED_CONTRAST
            said.append(
                f"half of the pool dropped after step {row.pruned.after}: {exploring:.3f} of the"
                f" seconds of exploring, {kept:.3f} of the contrast:"
                f" {'it pays' if pays else 'it does not pay'} ({PRUNED_COST:g} for"
                f" {PRUNED_CONTRAST:g} would)"
            )
    return said


def _write(
    out: Path,
    rows: Sequence[Row],
    chosen: Row | None,
    own: Setting,
    wanted: Wanted,
    found: Found,
    facts: Tree,
    tree: Tree,
) -> None:
    write_json(
        out / "tune.json",
        facts
        | {
            "wanted": dataclasses.asdict(wanted),
            "own": dataclasses.asdict(own),
            "chosen": None if chosen is None else chosen.label,
            "seconds": {
                "truth": found.truth_s,
                "update": found.update_s,
                "previews": [[*kind, value] for kind, value in found.seconds.items()],
            },
            "rows": [dataclasses.asdict(row) | {"label": row.label} for row in rows],
        },
    )
    points = [(row.label, row.cost, row.strength, row is chosen) for row in rows]
    write_text(out / "tune.svg", drawing(points, wanted.budget, wanted.by))
    changed = copy.deepcopy(tree)
    if chosen is not None:
        apply(changed, *chosen.setting.changes())
    write_text(out / "tuned.toml", to_toml(changed))
