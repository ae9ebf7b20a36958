"""Rank agreement between proxy rewards and full-precision rewards of the same seeds."""

from __future__ import annotations

import math

import numpy as np


def agreement(proxy: np.ndarray, full: np.ndarray) -> dict[str, float]:
    """Return Kendall's tau-b, Spearman's rho and sign agreement of rewards [n] of n seeds.

    Sign agreement is the share of seeds that are on the same side of the mean in both. All are NaN
    if either side is constant or n < 2. Needs memory of n^2.
    """
    # scipy's functions take 1 s to import and 3 ms per call; the driver calls this per prompt
    first, second = (np.sign(x[:, None] - x[None, :]) for x in (proxy, full))
    # each pair is counted in both orders
    of_first, of_second = (np.count_nonzero(signs) // 2 for signs in (first, second))
    if not of_first or not of_second:
        return dict.fromkeys(("kendall_tau", "spearman_rho", "sign_agreement"), float("nan"))
    agreeing = int(np.vdot(first, second)) // 2  # sums of so few ones are exact in floats
    tau = agreeing / math.sqrt(of_first) / math.sqrt(of_second)
    same = np.sign(proxy - proxy.mean()) == np.sign(full - full.mean())
    return {
        "kendall_tau": min(1.0, max(-1.0, tau)),
        "spearman_rho": _correlation(_ranks(first), _ranks(second)),
        "sign_agreement": int(np.count_nonzero(same)) / len(same),
    }


def _ranks(signs: np.ndarray) -> np.ndarray:
    """Return ``rewards.combine.rank`` of n values, from the signs [n, n] of their differences."""
    count = len(signs)
    return (count - 1 + signs.sum(axis=1, dtype=np.float64)) / (count - 1) - 1.0


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return Pearson's correlation, bit-identical to np.corrcoef."""
    rows = np.stack([a, b])
    rows -= rows.mean(axis=1)[:, None]
    products = np.dot(rows, rows.T) * (1 / (len(a) - 1))
    deviations = np.sqrt(np.diag(products))
    return min(1.0, max(-1.0, float(products[0, 1] / deviations[0] / deviations[1])))
