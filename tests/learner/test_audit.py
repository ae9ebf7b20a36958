"""The agreement of two rankings of the same noises is compared with manual calculations and with
scipy.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from learner.audit import agreement
from rewards.combine import rank


def test_agreement_matches_a_manual_calculation():
    proxy = np.array([1.0, 2.0, 3.0, 4.0])
    # one of six pairs swapped: tau = (5 - 1) / 6; rho = 1 - 6 * 2 / (4 * 15)
    full = np.array([1.0, 3.0, 2.0, 4.0])
    result = agreement(proxy, full)
    assert result["kendall_tau"] == pytest.approx(2 / 3)
    assert result["spearman_rho"] == pytest.approx(0.8)
    # 2 and 3 are on different sides of the mean 2.5
    assert result["sign_agreement"] == pytest.approx(0.5)
    assert agreement(proxy, -full)["sign_agreement"] == pytest.approx(0.5)
    assert agreement(proxy, proxy) == {"kendall_tau": 1, "spearman_rho": 1, "sign_agreement": 1}


@pytest.mark.parametrize(
    ("proxy", "full"), [([1.0], [2.0]), ([1.0, 1.0], [1.0, 2.0]), ([1.0, 2.0], [3.0, 3.0])]
)
def test_agreement_without_a_ranking_is_nan(proxy, full):
    assert all(np.isnan(value) for value in agreement(np.array(proxy), np.array(full)).values())


@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=2, max_size=96))
def test_agreement_with_ties_equals_scipy(pairs):
    """Tau is exactly equal, because both count pairs. Rho is equal up to the rounding of 96 sums,
    and exactly equal to numpy's correlation of the ranks.
    """
    proxy, full = np.array(pairs, np.float64).T
    result = agreement(proxy, full)
    if np.ptp(proxy) and np.ptp(full):
        assert result["kendall_tau"] == stats.kendalltau(proxy, full).statistic
        rho = stats.spearmanr(proxy, full).statistic
        assert result["spearman_rho"] == pytest.approx(rho, abs=96 * 2**-52)
        assert result["spearman_rho"] == np.corrcoef(rank(proxy), rank(full))[0, 1]
