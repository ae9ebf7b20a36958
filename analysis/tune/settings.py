"""What exploring settings find and cost: arithmetic on rewards that were measured once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from learner.selection import select


@dataclass(frozen=True)
class Setting:
    """How a prompt is explored; ``size`` (height, width) of previews, None: the model's own."""

    backend: str
    steps: int
    pool: int
    keep: int
    size: tuple[int, int] | None = None

    @property
    def label(self) -> str:
        """For people."""
        size = "" if self.size is None else f", {self.size[0]} x {self.size[1]}"
        return f"{self.keep} of {self.pool}, {self.backend} {self.steps} steps{size}"

    def changes(self) -> list[str]:
        """Its values as ``--set`` takes them."""
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
    """Every combination that keeps fewer than it explores, each once."""
    every = itertools.product(backends, steps, pools, keeps, sizes)
    return list(dict.fromkeys(Setting(*each) for each in every if each[3] < each[2]))


def contrasts(proxy: np.ndarray, truth: np.ndarray, pool: int, keep: int) -> np.ndarray:
    """Float64 [P]: the true reward of the best half of ``keep`` seeds less that of the worst half,
    as proxies choose them from ``pool``; the mean over the disjoint pools among N seeds.

    Rewards are [P, N]. Raises ValueError where N has no such pool.
    """
    return _over_pools(proxy, truth, pool, lambda cheap, full: _contrast(cheap, full, keep))


def left_of(pool: int) -> int:
    """How many seeds of a pool are in its best and its worst quarter."""
    return pool // 4 * 2


def pruned_contrasts(
    preview: np.ndarray, proxy: np.ndarray, truth: np.ndarray, pool: int, keep: int
) -> np.ndarray:
    """``contrasts`` where only the best and the worst quarter of a pool by ``preview`` rewards are
    finished and can be chosen by their ``proxy`` rewards.
    """
    both = np.stack([preview, proxy], axis=1)

    def found(cheap: np.ndarray, full: np.ndarray) -> float:
        early, last = cheap
        left = list(select(early, left_of(pool), "best_worst"))
        return _contrast(last[left], full[left], keep)

    return _over_pools(both, truth, pool, found)


def _over_pools(
    proxy: np.ndarray,
    truth: np.ndarray,
    pool: int,
    found: Callable[[np.ndarray, np.ndarray], float],
) -> np.ndarray:
    """The mean of ``found`` over the disjoint pools of each prompt."""
    count = truth.shape[1] // pool
    if not count:
        raise ValueError(f"no pool of {pool} among {truth.shape[1]} seeds")
    parts = [slice(k * pool, (k + 1) * pool) for k in range(count)]
    return np.array(
        [
            np.mean([found(cheap[..., part], full[part]) for part in parts])
            for cheap, full in zip(proxy, truth.astype(np.float64), strict=True)
        ]
    )


def _contrast(proxy: np.ndarray, truth: np.ndarray, keep: int) -> float:
    chosen = select(proxy, keep, "best_worst")
    return float(truth[list(chosen.best)].mean() - truth[list(chosen.worst)].mean())


def strength(contrast: np.ndarray, keep: int) -> np.ndarray:
    """Contrast times sqrt(keep): of ``keep`` samples the gradient's signal grows with their number
    and their contrast, its noise with the root of their number.
    """
    return contrast * np.sqrt(keep)
