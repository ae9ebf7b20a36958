"""Cost and strength of explore settings relative to the configuration's own, and the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from analysis.compare.operations import operations_of
from analysis.tune.measure import Kind, Measurements, Size
from analysis.tune.settings import Setting, contrasts, pruned_contrasts, strength
from configs.schema import RunConfig
from learner.fidelity import Estimate, estimates
from records.errors import RunFailed


@dataclass(frozen=True)
class TuneOptions:
    """Options of a measurement: the settings to try, and the budget.

    ``budget`` is the highest allowed cost as a share of the cost of the configuration's own
    setting. ``sizes`` begins with the configuration's own. ``prune`` lists steps after which half
    of a pool could be dropped.
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
    """Pruning of half of the pool after step ``after``.

    ``exploring`` is the time of exploring as a share of that without pruning.
    """

    after: int
    exploring: float


@dataclass(frozen=True)
class Row:
    """Results of a setting.

    ``cost`` is a share of the cost of the configuration's own setting. ``more`` is the difference
    in strength from the own setting as a share of that setting's strength, paired by prompt.
    """

    setting: Setting
    cost: float
    contrast: Estimate
    strength: Estimate
    more: Estimate
    pruned: Pruned | None = None

    @property
    def label(self) -> str:
        """Text that describes the setting in tables."""
        after = "" if self.pruned is None else f", half dropped after step {self.pruned.after}"
        return f"{self.setting.label}{after}"

    @property
    def per_cost(self) -> float:
        """Strength per cost."""
        return self.strength.mean / self.cost


def preview_kind(setting: Setting) -> Kind:
    """Return the kind of the finished previews of a setting."""
    return setting.backend, setting.steps, setting.size, None


def make_rows(
    found: Measurements,
    configs: Mapping[Setting, RunConfig],
    own: Setting,
    requested: TuneOptions,
    seed: int,
) -> list[Row]:
    """Return a row for each setting, the own one first, followed by its pruned variants.

    Raises RunFailed if the own setting finds no contrast, with which others could be compared.
    """
    costs = {setting: _cost(found, setting, configs[setting], requested) for setting in configs}
    columns = {
        setting: contrasts(
            found.rewards[preview_kind(setting)], found.truth, setting.pool, setting.keep
        )
        for setting in configs
    }
    base = strength(columns[own], own.keep)
    if base.mean() <= 0:
        means = {setting: float(column.mean()) for setting, column in columns.items()}
        best = max(means, key=lambda setting: means[setting])
        raise RunFailed(
            f"tune: the configuration's own setting has a contrast of {means[own]:.4f}: its"
            " previews do not find better seeds than chance, so others cannot be compared with it"
            f" (the highest contrast is {means[best]:.4f}, of {best.label}): measure more"
            " --prompts, explore more steps, or use a reward that varies"
        )

    def row(setting: Setting, cost: float, column: np.ndarray, pruned: Pruned | None = None) -> Row:
        strengths = strength(column, setting.keep)
        more = (strengths - base) / base.mean()
        parts = estimates({"contrast": column, "strength": strengths, "more": more}, seed)
        return Row(
            setting, cost / costs[own], parts["contrast"], parts["strength"], parts["more"], pruned
        )

    rows = [row(setting, costs[setting], column) for setting, column in columns.items()]
    if requested.by == "seconds":
        for stop_after in requested.prune:
            kind: Kind = (*preview_kind(own)[:3], stop_after)
            column = pruned_contrasts(
                found.rewards[kind],
                found.rewards[preview_kind(own)],
                found.truth,
                own.pool,
                own.keep,
            )
            saved, whole = _pruned_saving(found, own, stop_after), found.seconds[preview_kind(own)]
            pruned = Pruned(stop_after, 1 - saved / whole)
            rows.append(row(own, costs[own] - own.pool * saved, column, pruned))
    return rows


def _cost(
    measured: Measurements, setting: Setting, config: RunConfig, requested: TuneOptions
) -> float:
    """Return the cost of exploring, regenerating and training on a prompt.

    It is in seconds on this machine, or in operations.
    """
    if requested.by == "operations":
        return operations_of(config).at(requested.ratio) / config.prompts.per_iteration
    kept = measured.truth_s + measured.update_s
    return setting.pool * measured.seconds[preview_kind(setting)] + setting.keep * kept


def _pruned_saving(measured: Measurements, own: Setting, stop_after: int) -> float:
    """Return the seconds that pruning saves per seed of the pool.

    All seeds are decoded and scored after step ``stop_after``; only half of them continue to the
    last step, after which they are decoded and scored again. A preview of s steps is modeled to
    take s d + e seconds, d for a step and e for decoding and scoring.
    """
    early, last = (
        measured.seconds[(*preview_kind(own)[:3], stop_after)],
        measured.seconds[preview_kind(own)],
    )
    step = (last - early) / (own.steps - stop_after)
    finish = max(0.0, early - stop_after * step)
    return last - (early + ((own.steps - stop_after) * step + finish) / 2)


def choose(rows: Sequence[Row], budget: float) -> Row | None:
    """Return the strongest row whose cost is at most ``budget``, or None if there is none.

    Pruned variants are never chosen, because runs do not support pruning.
    """
    candidates = [row for row in rows if row.pruned is None and row.cost <= budget * (1 + 1e-9)]
    return max(candidates, key=lambda row: row.strength.mean, default=None)
