"""Rank fidelity of proxy rewards: compared with full-precision rewards over many prompts.

The measures are those of "FP4 Explore, BF16 Train" (arXiv 2604.06916): Kendall's tau, Spearman's
rho, and the true ranks of the seeds that selection by proxy rewards would choose. Rewards are
[P, N]: P prompts x N seeds, all finite. Rank 1 is the best seed, N the worst. Equal rewards share
the mean of their ranks, so a measure is the expected value under random tie-breaking.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from learner.audit import agreement
from learner.selection import select

HALVES = (4, 8, 12)
"""Numbers of best, and of worst, seeds in the paper's tables."""
LEVEL = 0.95  # of confidence intervals


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, its confidence interval, and the number of prompts."""

    mean: float
    low: float
    high: float
    prompts: int


def true_ranks(rewards: np.ndarray) -> np.ndarray:
    """Return ranks float64 [N] of rewards [N]: 1 is the best; ties share their mean rank."""
    return stats.rankdata(-np.asarray(rewards, np.float64), method="average")


def percentile(rank: np.ndarray | float, count: int) -> np.ndarray | float:
    """Convert a rank in 1 .. count to a percentile: 100 is the best seed, 0 the worst."""
    return 100.0 * (count - rank) / (count - 1)


def per_prompt(
    proxy: np.ndarray, truth: np.ndarray, halves: Sequence[int] = HALVES
) -> dict[str, np.ndarray]:
    """Return every measure for every prompt: float64 [P] each.

    ``kendall_tau`` and ``spearman_rho`` are NaN for a prompt whose proxy or true rewards are
    constant. For each k of ``halves``, ``top<k>_rank`` and ``bottom<k>_rank`` are the mean true
    rank of the k best and k worst seeds by proxy reward, chosen as runs choose (ties by index).
    ``top<k>_percentile`` and ``bottom<k>_percentile`` are the same as percentiles. ``contrast<k>``
    is the mean true reward of the k best minus that of the k worst, divided by the difference that
    selection by true rewards would reach (1: nothing is lost). It is NaN if that difference is 0.

    Raises ValueError if shapes differ, rewards are not finite, or 2 k > N.
    """
    proxy, truth = _checked(proxy, truth)
    count = truth.shape[1]
    if 2 * max(halves) > count:
        raise ValueError(
            f"best {max(halves)} and worst {max(halves)} of {count} seeds overlap: use more seeds"
            " or fewer best"
        )
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for cheap, full in zip(proxy, truth, strict=True):
        measures = agreement(cheap, full)
        columns["kendall_tau"].append(measures["kendall_tau"])
        columns["spearman_rho"].append(measures["spearman_rho"])
        ranks, ordered = true_ranks(full), np.sort(full)
        for k in halves:
            chosen = select(cheap, 2 * k, "best_worst")
            best, worst = list(chosen.best), list(chosen.worst)
            for end, indices in (("top", best), ("bottom", worst)):
                rank = float(ranks[indices].mean())
                columns[f"{end}{k}_rank"].append(rank)
                columns[f"{end}{k}_percentile"].append(float(percentile(rank, count)))
            possible = ordered[-k:].mean() - ordered[:k].mean()
            contrast = (
                float((full[best].mean() - full[worst].mean()) / possible)
                if possible > 0
                else math.nan
            )
            columns[f"contrast{k}"].append(contrast)
    return {name: np.array(values) for name, values in columns.items()}


def estimates(
    columns: Mapping[str, np.ndarray], seed: int = 0, draws: int = 2000
) -> dict[str, Estimate]:
    """Return means over prompts with percentile-bootstrap confidence intervals.

    Prompts are resampled with replacement, each with all of its seeds. All columns of a call share
    the same draws, as do calls with equal P and ``seed``. A column's NaN values are left out; if
    all are NaN, its estimate is NaN.
    """
    counts = {len(values) for values in columns.values()}
    if len(counts) != 1 or not min(counts):
        raise ValueError(
            f"columns of {sorted(counts)} prompts: all need the same number of prompts, at least"
            " one"
        )
    (count,) = counts
    picks = np.random.default_rng(seed).integers(0, count, (draws, count))
    return {
        name: _estimate(np.asarray(values, np.float64), picks) for name, values in columns.items()
    }


def _estimate(values: np.ndarray, picks: np.ndarray) -> Estimate:
    """Return the estimate of one column [P]; ``picks`` [draws, P] are the resampled prompts."""
    finite = np.isfinite(values)
    if not finite.any():
        return Estimate(float("nan"), float("nan"), float("nan"), 0)
    weights = finite[picks].sum(1)
    # draws that consist of NaN prompts alone have no mean
    means = np.where(finite, values, 0.0)[picks].sum(1)[weights > 0] / weights[weights > 0]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(values[finite].mean()), float(low), float(high), int(finite.sum()))


def no_information(count: int, halves: Sequence[int] = HALVES) -> dict[str, float]:
    """Return the expected measures of a random ranking of ``count`` seeds."""
    middle = (count + 1) / 2
    expected = {"kendall_tau": 0.0, "spearman_rho": 0.0}
    for k in halves:
        expected |= {f"{end}{k}_rank": middle for end in ("top", "bottom")}
        expected |= {f"{end}{k}_percentile": 50.0 for end in ("top", "bottom")}
        expected[f"contrast{k}"] = 0.0
    return expected


def conditional_density(
    proxy: np.ndarray, truth: np.ndarray, bins: int | None = None
) -> np.ndarray:
    """Return the distribution of proxy ranks given the true rank: float64 [true bin, proxy bin].

    Bins are ordered best first, and each row sums to 1. ``bins`` is at most N; None chooses 4 to 24
    bins so that a cell has four seeds on average. Seeds of equal reward are spread evenly over the
    ranks that they share.
    """
    proxy, truth = _checked(proxy, truth)
    count = truth.shape[1]
    bins = min(max(4, min(24, math.isqrt(truth.size // 4))) if bins is None else bins, count)
    joint = np.zeros((bins, bins))
    for cheap, full in zip(proxy, truth, strict=True):
        joint += _rank_shares(full, bins).T @ _rank_shares(cheap, bins)
    return joint / joint.sum(1, keepdims=True)


def _rank_shares(rewards: np.ndarray, bins: int) -> np.ndarray:
    """Return [N, bins]: the share of each seed's tied ranks that lies in each bin.

    Rank r, counted from 0, lies in bin r * bins // N.
    """
    count = len(rewards)
    first = stats.rankdata(-rewards, method="min").astype(int) - 1
    last = stats.rankdata(-rewards, method="max").astype(int)
    below = np.zeros((count + 1, bins))  # [r, b]: how many ranks below r lie in bin b
    below[1:] = np.cumsum(np.eye(bins)[np.arange(count) * bins // count], axis=0)
    return (below[last] - below[first]) / (last - first)[:, None]


def _checked(proxy: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return both as float64. Raises ValueError if shapes differ or values are not finite."""
    proxy, truth = np.asarray(proxy, np.float64), np.asarray(truth, np.float64)
    if proxy.ndim != 2 or proxy.shape != truth.shape or proxy.shape[1] < 2 or not len(proxy):
        raise ValueError(
            f"proxy rewards {list(proxy.shape)} and true rewards {list(truth.shape)}: both must be"
            " [P, N], N >= 2"
        )
    if not (np.isfinite(proxy).all() and np.isfinite(truth).all()):
        bad = int((~np.isfinite(proxy)).sum() + (~np.isfinite(truth)).sum())
        raise ValueError(
            f"{bad} rewards are not finite: a seed without a reward has no rank, so leave out its"
            " prompt"
        )
    return proxy, truth
