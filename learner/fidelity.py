"""Is the cheap ranking right? Proxy rewards against full-precision rewards of the same seeds, over
many prompts.

The measures of "FP4 Explore, BF16 Train" (arXiv 2604.06916): Kendall's tau, Spearman's rho, and
where the seeds that the ring would choose by their proxies really stand. Rewards are [P, N]: P
prompts x N seeds, all finite. Rank 1 is the best seed, N the worst; equal rewards share the mean
of their ranks, so a measure is what breaking ties at random gives on average.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

from learner.audit import agreement
from learner.selection import select

HALVES = (4, 8, 12)
LEVEL = 0.95  # of intervals


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its confidence interval, and over how many prompts."""

    mean: float
    low: float
    high: float
    prompts: int


def true_ranks(rewards: np.ndarray) -> np.ndarray:
    """Ranks float64 [N] of rewards [N]: 1 the best, ties share their mean."""
    return stats.rankdata(-np.asarray(rewards, np.float64), method="average")


def percentile(rank: np.ndarray | float, count: int) -> np.ndarray | float:
    """Rank 1 .. count as a percentile: 100 is the very best seed, 0 the very worst."""
    return 100.0 * (count - rank) / (count - 1)


def per_prompt(proxy: np.ndarray, truth: np.ndarray) -> dict[str, np.ndarray]:
    """Every measure for every prompt: float64 [P] each.

    ``kendall_tau`` and ``spearman_rho`` are NaN where a side is constant. ``top<k>_rank`` and
    ``bottom<k>_rank`` are the mean true rank of the k seeds that selection by proxy calls best and
    worst (the ring's own rule, ties by index); ``..._percentile`` the same as percentiles.
    ``contrast<k>`` is the true reward of the k best less that of the k worst, as a share of what
    selection by the truth would find (1: nothing lost); NaN where there is none to find.

    Raises ValueError for shapes that differ, rewards that are not finite, or 2 k > N.
    """
    proxy, truth = _checked(proxy, truth)
    count = truth.shape[1]
    if 2 * max(HALVES) > count:
        raise ValueError(
            f"best {max(HALVES)} and worst {max(HALVES)} of {count} seeds overlap: use more seeds"
            " or fewer best"
        )
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for cheap, full in zip(proxy, truth, strict=True):
        agreed = agreement(cheap, full)
        columns["kendall_tau"].append(agreed["kendall_tau"])
        columns["spearman_rho"].append(agreed["spearman_rho"])
        ranks, ordered = true_ranks(full), np.sort(full)
        for k in HALVES:
            chosen = select(cheap, 2 * k, "best_worst")
            best, worst = list(chosen.best), list(chosen.worst)
            for end, indices in (("top", best), ("bottom", worst)):
                rank = float(ranks[indices].mean())
                columns[f"{end}{k}_rank"].append(rank)
                columns[f"{end}{k}_percentile"].append(float(percentile(rank, count)))
            possible = ordered[-k:].mean() - ordered[:k].mean()
            found = (
                float((full[best].mean() - full[worst].mean()) / possible)
                if possible > 0
                else math.nan
            )
            columns[f"contrast{k}"].append(found)
    return {name: np.array(values) for name, values in columns.items()}


def estimates(
    columns: Mapping[str, np.ndarray], seed: int = 0, draws: int = 2000
) -> dict[str, Estimate]:
    """Means over prompts with percentile-bootstrap intervals: prompts are drawn with replacement,
    seeds stay with theirs.

    The same draws serve every column of one call, and any call with equal P and ``seed``. NaN
    prompts are left out of a column; one that has no other is NaN.
    """
    counts = {len(values) for values in columns.values()}
    if len(counts) != 1 or not min(counts):
        raise ValueError(
            f"columns of {sorted(counts)} prompts: all need the same number, at least one"
        )
    (count,) = counts
    picks = np.random.default_rng(seed).integers(0, count, (draws, count))
    return {
        name: _estimate(np.asarray(values, np.float64), picks) for name, values in columns.items()
    }


def _estimate(values: np.ndarray, picks: np.ndarray) -> Estimate:
    there = np.isfinite(values)
    if not there.any():
        return Estimate(float("nan"), float("nan"), float("nan"), 0)
    weights = there[picks].sum(1)
    means = np.where(there, values, 0.0)[picks].sum(1)[weights > 0] / weights[weights > 0]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(values[there].mean()), float(low), float(high), int(there.sum()))


def no_information(count: int) -> dict[str, float]:
    """What a ranking at random gives on average, for ``count`` seeds."""
    middle = (count + 1) / 2
    found = {"kendall_tau": 0.0, "spearman_rho": 0.0}
    for k in HALVES:
        found |= {f"{end}{k}_rank": middle for end in ("top", "bottom")}
        found |= {f"{end}{k}_percentile": 50.0 for end in ("top", "bottom")}
        found[f"contrast{k}"] = 0.0
    return found


def conditional_density(
    proxy: np.ndarray, truth: np.ndarray, bins: int | None = None
) -> np.ndarray:
    """How proxy ranks are spread, given the true rank: float64 [bins, bins], [true bin, proxy bin],
    best first.

    Each row sums to 1. ``bins`` is lowered to N where it is more; None: as many as have four seeds
    in each cell on average, 4 to 24. Noises of equal reward are spread evenly over the ranks they
    share.
    """
    proxy, truth = _checked(proxy, truth)
    count = truth.shape[1]
    bins = min(max(4, min(24, math.isqrt(truth.size // 4))) if bins is None else bins, count)
    joint = np.zeros((bins, bins))
    for cheap, full in zip(proxy, truth, strict=True):
        joint += _rank_shares(full, bins).T @ _rank_shares(cheap, bins)
    return joint / joint.sum(1, keepdims=True)


def _rank_shares(rewards: np.ndarray, bins: int) -> np.ndarray:
    """[N, bins]: which share of its tied ranks each seed has in each bin; rank r (from 0) lies in
    bin r * bins // N.
    """
    count = len(rewards)
    first = stats.rankdata(-rewards, method="min").astype(int) - 1
    last = stats.rankdata(-rewards, method="max").astype(int)
    held = np.zeros((count + 1, bins))  # ranks below r that lie in each bin
    held[1:] = np.cumsum(np.eye(bins)[np.arange(count) * bins // count], axis=0)
    return (held[last] - held[first]) / (last - first)[:, None]


def _checked(proxy: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    proxy, truth = np.asarray(proxy, np.float64), np.asarray(truth, np.float64)
    if proxy.ndim != 2 or proxy.shape != truth.shape or proxy.shape[1] < 2 or not len(proxy):
        raise ValueError(
            f"proxy rewards {list(proxy.shape)} and true rewards {list(truth.shape)}: both must be"
            " [P, N], N >= 2"
        )
    if not (np.isfinite(proxy).all() and np.isfinite(truth).all()):
        bad = int((~np.isfinite(proxy)).sum() + (~np.isfinite(truth)).sum())
        raise ValueError(
            f"{bad} rewards are not finite: a seed without a reward has no rank, leave its"
            " prompt out"
        )
    return proxy, truth
