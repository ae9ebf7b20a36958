"""Does the cheap ranking hold? Agreement of proxy and full-precision rewards of the same seeds."""

from __future__ import annotations

from typing import Any

import numpy as np


def agreement(proxy: np.ndarray, full: np.ndarray) -> dict[str, float]:
    """Kendall tau-b, Spearman rho and sign agreement of rewards float [n] of n seeds of a prompt.

    Sign agreement is the share of seeds that lie on the same side of their group's mean under
    both. NaN where a side is constant or n < 2: there is nothing to rank.
    """
    if len(proxy) < 2 or np.ptp(proxy) == 0 or np.ptp(full) == 0:
        return dict.fromkeys(("kendall_tau", "spearman_rho", "sign_agreement"), float("nan"))
    # here, as the driver imports this module before its first actor: scipy takes over a second
    from scipy import stats

    same = np.sign(proxy - proxy.mean()) == np.sign(full - full.mean())
    tau: Any = stats.kendalltau(proxy, full)
    rho: Any = stats.spearmanr(proxy, full)
    return {
        "kendall_tau": float(tau.statistic),
        "spearman_rho": float(rho.statistic),
        "sign_agreement": float(same.mean()),
    }
