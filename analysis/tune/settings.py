"""Explore settings, and their contrast and strength computed from rewards measured once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from learner.selection import select


@dataclass(frozen=True)
class Setting:
    """Explore setting; ``size`` is the (height, width) of previews, or None for the model's own."""

    backend: str
    steps: int
    pool: int
    keep: int
    size: tuple[int, int] | None = None

    @property
    def label(self) -> str:
        """Text that describes the setting in tables."""
        size = "" if self.size is None else f", {self.size[0]} x {self.size[1]}"
        return f"{self.keep} of {self.pool}, {self.backend} {self.steps} steps{size}"

    def changes(self) -> list[str]:
        """Return the values in the form of ``--set`` arguments."""
        size = zip(("height", "width"), self.size or (), strict=False)
        return [
            f"explore.backend={self.backend}",
            f"explore.steps={self.steps}",
            f"explore.pool_size={self.pool}",
            f"selection.keep={self.keep}",
            *(f"explore.{key}={value}" for key, value in size),
        ]


def grid(
    backends: Sequence[str],
    steps: Sequence[int],
    pools: Sequence[int],
    keeps: Sequence[int],
    sizes: Sequence[tuple[int, int] | None],
) -> list[Setting]:
    """Return every combination that keeps fewer seeds than it explores, without duplicates."""
    combinations = itertools.product(backends, steps, pools, keeps, sizes)
    return list(dict.fromkeys(Setting(*values) for values in combinations if values[3] < values[2]))


def contrasts(proxy: np.ndarray, truth: np.ndarray, pool: int, keep: int) -> np.ndarray:
    """Return the contrast, float64 [P], of ``keep`` seeds that proxies select from ``pool``.

    The contrast is the mean true reward of the best half minus that of the worst half, averaged
    over the disjoint pools among N seeds. Rewards are [P, N]. Raises ValueError if N < ``pool``.
    """
    return _over_pools(proxy, truth, pool, lambda cheap, full: _contrast(cheap, full, keep))


def seeds_after_pruning(pool: int) -> int:
    """Return the number of seeds that pruning keeps: the best and the worst quarter of a pool."""
    return pool // 4 * 2


def pruned_contrasts(
    preview: np.ndarray, proxy: np.ndarray, truth: np.ndarray, pool: int, keep: int
) -> np.ndarray:
    """Return ``contrasts`` with pruning.

    Only the best and the worst quarter of a pool by ``preview`` rewards are finished and can be
    selected by their ``proxy`` rewards.
    """
    both = np.stack([preview, proxy], axis=1)

    def pruned_contrast(cheap: np.ndarray, full: np.ndarray) -> float:
        early, last = cheap
        remaining = list(select(early, seeds_after_pruning(pool), "best_worst"))
        return _contrast(last[remaining], full[remaining], keep)

    return _over_pools(both, truth, pool, pruned_contrast)


def _over_pools(
    proxy: np.ndarray,
    truth: np.ndarray,
    pool: int,
    contrast: Callable[[np.ndarray, np.ndarray], float],
) -> np.ndarray:
    """Return the mean of ``contrast`` over the disjoint pools of each prompt."""
    count = truth.shape[1] // pool
    if not count:
        raise ValueError(f"no pool of {pool} among {truth.shape[1]} seeds")
    parts = [slice(k * pool, (k + 1) * pool) for k in range(count)]
    return np.array(
        [
            np.mean([contrast(cheap[..., part], full[part]) for part in parts])
            for cheap, full in zip(proxy, truth.astype(np.float64), strict=True)
        ]
    )


def _contrast(proxy: np.ndarray, truth: np.ndarray, keep: int) -> float:
    chosen = select(proxy, keep, "best_worst")
    return float(truth[list(chosen.best)].mean() - truth[list(chosen.worst)].mean())


def strength(contrast: np.ndarray, keep: int) -> np.ndarray:
    """Return contrast times sqrt(keep), proportional to a gradient's signal-to-noise ratio.

    The signal of ``keep`` samples grows with their number and their contrast, and the noise with
    the square root of their number.
    """
    return contrast * np.sqrt(keep)
