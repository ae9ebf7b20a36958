"""Does the cheap ranking hold? Agreement of proxy and full-precision rewards of the same seeds."""

from __future__ import annotations

import math

import numpy as np

from rewards.combine import rank


def agreement(proxy: np.ndarray, full: np.ndarray) -> dict[str, float]:
    """Kendall tau-b, Spearman rho and sign agreement of rewards float [n] of n seeds of a prompt.

    Sign agreement is the share of seeds that lie on the same side of their group's mean under
    both. NaN where a side is constant or n < 2: there is nothing to rank. Takes n^2 of memory.
    """
    if len(proxy) < 2 or np.ptp(proxy) == 0 or np.ptp(full) == 0:
        return dict.fromkeys(("kendall_tau", "spearman_rho", "sign_agreement"), float("nan"))
    same = np.sign(proxy - proxy.mean()) == np.sign(full - full.mean())
    return {
        "kendall_tau": kendall_tau(proxy, full),
        "spearman_rho": float(np.corrcoef(rank(proxy), rank(full))[0, 1]),
        "sign_agreement": float(same.mean()),
    }


def kendall_tau(a: np.ndarray, b: np.ndarray) -> float:
    """Tau-b of float [n] with float [n], neither of them constant."""
    # not scipy's, which takes a second to import and 3 ms a call: the driver asks for each prompt
    first, second = (np.sign(x[:, None] - x[None, :]) for x in (a, b))
    # each pair is in the sums in both orders; sums of so few ones are exact in floats
    agreeing = int(np.vdot(first, second)) // 2
    of_first, of_second = (np.count_nonzero(signs) // 2 for signs in (first, second))
    return min(1.0, max(-1.0, agreeing / math.sqrt(of_first) / math.sqrt(of_second)))
