"""Does the cheap ranking hold? Agreement between proxy and full-precision rewards of the same noises."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats


def agreement(proxy: np.ndarray, full: np.ndarray) -> dict[str, float]:
    """Kendall tau-b, Spearman rho and sign agreement of rewards float [n] of the same n noises of
    one prompt.

    Sign agreement is the share of noises that lie on the same side of their group's mean under
    both. NaN where a side is constant or n < 2: there is nothing to rank.
    """
    if len(proxy) < 2 or np.ptp(proxy) == 0 or np.ptp(full) == 0:
        return {
            "kendall_tau": float("nan"),
            "spearman_rho": float("nan"),
            "sign_agreement": float("nan"),
        }
    tau: Any = stats.kendalltau(proxy, full)
    rho: Any = stats.spearmanr(proxy, full)
    same = np.sign(proxy - proxy.mean()) == np.sign(full - full.mean())
    return {
        "kendall_tau": float(tau.statistic),
        "spearman_rho": float(rho.statistic),
        "sign_agreement": float(same.mean()),
    }
