"""Rank agreement is compared with closed forms and with scipy."""

import numpy as np
import pytest
from scipy import stats

from learner.fidelity import (
    conditional_density,
    estimates,
    no_information,
    per_prompt,
    percentile,
    true_ranks,
)

P, N = 5, 96


def rewards(seed: int = 0, prompts: int = P) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((prompts, N))


def test_ranks_start_at_the_best_and_ties_share_their_mean():
    assert true_ranks(np.array([0.1, 0.9, 0.5, 0.5])).tolist() == [4, 1, 2.5, 2.5]
    assert (percentile(1, 96), percentile(96, 96), percentile(48.5, 96)) == (100, 0, 50)


def test_perfect_agreement():
    truth = rewards()
    result = per_prompt(np.exp(truth) + 3, truth)  # any increasing function keeps the ranks
    for k in (4, 8, 12):
        assert np.allclose(result[f"top{k}_rank"], (k + 1) / 2)
        assert np.allclose(result[f"bottom{k}_rank"], N - (k - 1) / 2)
        assert np.allclose(result[f"contrast{k}"], 1)
    # the numbers that the paper gives next to its table
    assert result["top12_rank"][0] == 6.5 and result["bottom12_rank"][0] == 90.5
    assert np.allclose(result["kendall_tau"], 1) and np.allclose(result["spearman_rho"], 1)
    assert np.allclose(result["top12_percentile"], 100 * (96 - 6.5) / 95)


def test_reversed_ranking():
    truth = rewards()
    result = per_prompt(-truth, truth)
    assert np.allclose(result["kendall_tau"], -1) and np.allclose(result["spearman_rho"], -1)
    assert np.allclose(result["top12_rank"], 90.5) and np.allclose(result["bottom12_rank"], 6.5)
    assert np.allclose(result["contrast12"], -1)


def test_independent_rankings_have_middle_ranks():
    prompts = 2000
    result = per_prompt(rewards(1, prompts), rewards(2, prompts))
    chance = no_information(N)
    assert chance["top12_rank"] == 48.5
    for k in (4, 8, 12):
        # the mean rank of k of N samples without replacement has the variance
        # (N + 1)(N - k) / (12 k); the test allows five standard errors of the mean
        tolerance = 5 * np.sqrt((N + 1) * (N - k) / (12 * k) / prompts)
        assert result[f"top{k}_rank"].mean() == pytest.approx(48.5, abs=tolerance)
        assert result[f"bottom{k}_rank"].mean() == pytest.approx(48.5, abs=tolerance)
    # Var(tau) = 2 (2N + 5) / (9 N (N - 1)), Var(rho) = 1 / (N - 1)
    assert result["kendall_tau"].mean() == pytest.approx(
        0, abs=5 * np.sqrt(2 * (2 * N + 5) / (9 * N * (N - 1)) / prompts)
    )
    assert result["spearman_rho"].mean() == pytest.approx(0, abs=5 * np.sqrt(1 / (N - 1) / prompts))


def test_correlations_with_ties_equal_scipy():
    rng = np.random.default_rng(3)
    truth = rng.integers(0, 6, (P, N)).astype(float)
    proxy = truth + rng.integers(-2, 3, (P, N))
    result = per_prompt(proxy, truth)
    for p in range(P):
        assert result["kendall_tau"][p] == pytest.approx(
            stats.kendalltau(proxy[p], truth[p]).statistic
        )
        ranks = stats.rankdata(proxy[p]), stats.rankdata(truth[p])
        assert result["spearman_rho"][p] == pytest.approx(np.corrcoef(*ranks)[0, 1])


def test_prompt_with_constant_rewards_has_middle_ranks_and_no_correlation():
    truth = rewards()
    truth[2] = 0.5
    result = per_prompt(rewards(7), truth)
    assert np.isnan(result["kendall_tau"][2])
    assert np.isnan(result["contrast4"][2])
    assert result["top4_rank"][2] == 48.5
    summary = estimates(result)
    assert summary["kendall_tau"].prompts == P - 1 and summary["top4_rank"].prompts == P
    assert summary["kendall_tau"].mean == pytest.approx(np.delete(result["kendall_tau"], 2).mean())


def test_bootstrap_interval_of_a_normal_mean():
    values = np.random.default_rng(0).standard_normal(400)
    result = estimates({"a": values, "b": 10 + 2 * values}, seed=1, draws=4000)
    half_width = 1.96 * values.std() / np.sqrt(400)
    # a bootstrap quantile of 4000 draws has a standard error of about
    # sqrt(.025 * .975 / 4000) / pdf(1.96) = 0.042 sigma; the test allows 5 of them, 11 %
    assert result["a"].mean == pytest.approx(values.mean())
    assert result["a"].high - result["a"].mean == pytest.approx(half_width, rel=0.11)
    assert result["a"].mean - result["a"].low == pytest.approx(half_width, rel=0.11)
    # every column uses the same draws
    assert result["b"].low == pytest.approx(10 + 2 * result["a"].low)
    assert estimates({"a": values}, seed=1, draws=4000)["a"] == result["a"]
    assert estimates({"a": values}, seed=2, draws=4000)["a"] != result["a"]


def test_density_of_perfect_reversed_and_absent_rankings():
    truth = rewards()
    assert np.array_equal(conditional_density(truth, truth, 24), np.eye(24))
    assert np.array_equal(conditional_density(-truth, truth, 24), np.eye(24)[::-1])
    assert np.allclose(conditional_density(np.zeros_like(truth), truth, 24), 1 / 24)
    assert conditional_density(truth[:, :10], truth[:, :10], 24).shape == (10, 10)
    sizes = [
        len(conditional_density(noise, noise))
        for noise in np.split(np.random.default_rng(0).random((3, 32, 96))[0], [1, 3])
    ]
    assert sizes == [4, 6, 24]  # 96, 192 and 2784 noises, four to a cell


def test_density_spreads_ties_evenly():
    truth = np.array([[4.0, 3.0, 2.0, 1.0]])
    # the best two are tied, and the last two of the truth are exchanged
    proxy = np.array([[1.0, 1.0, 0.0, 0.5]])
    expected = [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]
    assert np.array_equal(conditional_density(proxy, truth, 4), expected)


def test_rows_of_a_density_with_unequal_cells_sum_to_one():
    result = conditional_density(rewards(1)[:, :50], rewards(2)[:, :50], 24)
    assert np.allclose(result.sum(1), 1) and (result >= 0).all()


@pytest.mark.parametrize(
    ("proxy", "truth", "message"),
    [
        (np.zeros((2, 8)), np.zeros((2, 9)), "shape|must be"),
        (np.full((2, 96), np.nan), np.zeros((2, 96)), "192 rewards are not finite"),
        (np.zeros((2, 16)), np.zeros((2, 16)), "overlap"),
    ],
)
def test_invalid_rewards_are_refused(proxy, truth, message):
    with pytest.raises(ValueError, match=message):
        per_prompt(proxy, truth)
