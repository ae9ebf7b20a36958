"""Selection depends only on its input: golden cases, and properties over random pools."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.selection import RULES, select

REWARDS = [0.3, 0.9, 0.1, 0.5, 0.9, 0.1]


def test_best_worst_matches_a_manual_selection():
    chosen = select(REWARDS, 4)
    assert chosen.best == (1, 4)  # 0.9 occurs twice; the lower index is first
    assert chosen.worst == (2, 5)
    assert chosen.indices == tuple(chosen) == (1, 2, 4, 5) and len(chosen) == 4


def test_ties_select_the_lower_index():
    assert select([0.5] * 6, 4).indices == (0, 1, 2, 3)
    assert select([1, 1, 1, 0, 0, 0], 2).indices == (0, 3)
    assert select([1, -1, 1, -1, 0], 3, "mean_deviation").indices == (0, 1, 2)


def test_mean_deviation_selects_the_largest_distances_from_the_mean():
    # mean 2.0, distances 2, 1, 8, 1, 2.2, 1.8: the outlier, then 4.2, then 0
    chosen = select([0.0, 1.0, 10.0, 1.0, -0.2, 0.2], 3, "mean_deviation")
    assert chosen.indices == (0, 2, 4)
    assert chosen.best == (2, 0) and chosen.worst == (4,)


def test_random_selection_ignores_rewards_and_missing_samples():
    pool = np.arange(40)
    first = set(select(pool, 10, "random", seed=5))
    assert first == set(select(-pool, 10, "random", seed=5))
    assert first != set(select(pool, 10, "random", seed=6))
    dropped = min(first)
    left = np.delete(pool, dropped)
    assert first - {dropped} <= set(select(left, 10, "random", seed=5, candidates=left))


def test_random_selection_is_uniform():
    """Each of 8 candidates is kept for a quarter of the seeds. With 2000 draws the standard error
    is sqrt(.25 * .75 / 2000) = 0.0097. The test allows 5 of them.
    """
    counts = np.zeros(8)
    for seed in range(2000):
        counts[list(select(np.zeros(8), 2, "random", seed=seed))] += 1
    assert np.abs(counts / 2000 - 0.25).max() < 0.05


def test_dropped_samples_keep_their_pool_indices():
    assert select([0.2, 0.8, 0.5], 2, candidates=[3, 7, 5]).indices == (3, 7)


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="only 3 samples have a reward, but selection.keep = 4"):
        select([1, 2, 3], 4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_rewards_are_refused(bad):
    with pytest.raises(ValueError, match="candidate 7 has reward"):
        select([0.0, bad, 1.0], 2, candidates=[3, 7, 9])


def test_invalid_requests_are_refused():
    with pytest.raises(ValueError, match="must be even"):
        select(REWARDS, 3)
    with pytest.raises(
        ValueError,
        match="unknown selection rule 'best': use one of best_worst, random, mean_deviation",
    ):
        select(REWARDS, 2, "best")
    with pytest.raises(ValueError, match="one reward per distinct candidate"):
        select([1, 2], 2, candidates=[4, 4])
    with pytest.raises(ValueError, match="at least one"):
        select(REWARDS, 0)


POOLS = st.lists(st.integers(-5, 5), min_size=4, max_size=30)  # few values, so that ties are common


@given(POOLS, st.sampled_from(sorted(RULES)), st.integers(0, 3), st.randoms())
def test_order_of_arrival_does_not_matter(rewards, rule, seed, shuffler):
    order = list(range(len(rewards)))
    shuffler.shuffle(order)
    assert select([rewards[i] for i in order], 4, rule, seed, candidates=order) == select(
        rewards, 4, rule, seed
    )


@given(POOLS, st.integers(1, 2))
def test_no_remaining_sample_is_more_extreme_than_the_selected(rewards, half):
    chosen = select(rewards, 2 * half)
    left = [rewards[i] for i in range(len(rewards)) if i not in set(chosen)]
    assert len(set(chosen.best) | set(chosen.worst)) == 2 * half
    assert all(value <= min(rewards[i] for i in chosen.best) for value in left)
    assert all(value >= max(rewards[i] for i in chosen.worst) for value in left)
    assert sorted((*chosen.best, *chosen.worst)) == list(chosen)


@given(POOLS, st.floats(0.1, 10), st.floats(-5, 5))
def test_best_worst_depends_only_on_the_order_of_rewards(rewards, scale, shift):
    """An increasing map of small integers preserves order and ties in float64."""
    assert select([scale * r + shift for r in rewards], 4) == select(rewards, 4)


@given(POOLS)
def test_mean_deviation_selects_the_samples_furthest_from_the_mean(rewards):
    chosen = set(select(rewards, 3, "mean_deviation"))
    distance = np.abs(np.array(rewards) - np.mean(rewards))
    assert min(distance[list(chosen)]) >= max(np.delete(distance, list(chosen)))
