"""Cost and strength of settings relative to the configuration's own, and the choice of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from analysis.compare.operations import operations_of
from analysis.tune.measure import Found, Kind, Size
from analysis.tune.settings import Setting, contrasts, pruned_contrasts, strength
from configs.schema import RunConfig
from learner.fidelity import Estimate, estimates


@dataclass(frozen=True)
class Wanted:
    """The settings to try. ``budget``: the most that a setting may cost, as a share of what the
    configuration's own costs; ``sizes``: the configuration's own first; ``prune``: steps after
    which half of a pool could be dropped.
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
    """Half of the pool is dropped ``after`` a step; ``exploring``: seconds over those without."""

    after: int
    exploring: float


@dataclass(frozen=True)
class Row:
    """A setting: its cost as a share of the own setting's, its contrast and strength, and ``more``,
    the strength that it has more than the own setting, as a share of that, paired by prompt.
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


def kind_of(setting: Setting) -> Kind:
    """The finished previews of a setting."""
    return setting.backend, setting.steps, setting.size, None


def rows_of(
    found: Found, configs: Mapping[Setting, RunConfig], own: Setting, wanted: Wanted, seed: int
) -> list[Row]:
    """A row for each setting, the own one first, then its pruned forms."""
    costs = {setting: _cost(found, setting, configs[setting], wanted) for setting in configs}
    columns = {
        setting: contrasts(found.rewards[kind_of(setting)], found.truth, setting.pool, setting.keep)
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
            kind: Kind = (*kind_of(own)[:3], upto)
            column = pruned_contrasts(
                found.rewards[kind], found.rewards[kind_of(own)], found.truth, own.pool, own.keep
            )
            saved, whole = _pruned_saving(found, own, upto), found.seconds[kind_of(own)]
            pruned = Pruned(upto, 1 - saved / whole)
            rows.append(row(own, costs[own] - own.pool * saved, column, pruned))
    return rows


def _cost(found: Found, setting: Setting, config: RunConfig, wanted: Wanted) -> float:
    """Cost of exploring, regenerating and training on a prompt: seconds here, or operations."""
    if wanted.by == "operations":
        return operations_of(config).at(wanted.ratio) / config.prompts.per_iteration
    kept = found.truth_s + found.update_s
    return setting.pool * found.seconds[kind_of(setting)] + setting.keep * kept


def _pruned_saving(found: Found, own: Setting, upto: int) -> float:
    """Seconds per seed of the pool: half of them are spared the other steps, but all previews of
    step ``upto`` are decoded and scored beside the finished ones.

    A preview of s steps takes s d + e seconds, d for a step and e for decoding and scoring.
    """
    early, last = found.seconds[(*kind_of(own)[:3], upto)], found.seconds[kind_of(own)]
    step = (last - early) / (own.steps - upto)
    finish = max(0.0, early - upto * step)
    return last - (early + ((own.steps - upto) * step + finish) / 2)


def choose(rows: Sequence[Row], budget: float) -> Row | None:
    """The row with most strength at a cost of at most ``budget``; None: none is so cheap. Pruned
    forms are not chosen, as no run can explore so.
    """
    possible = [row for row in rows if row.pruned is None and row.cost <= budget * (1 + 1e-9)]
    return max(possible, key=lambda row: row.strength.mean, default=None)
