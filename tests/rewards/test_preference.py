"""Scores from comparisons: closed forms, the optimum of the likelihood, and the meaning of a
ranking.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from rewards.preference import (
    PRIOR,
    consistency,
    count_wins,
    random_lists,
    strengths,
    win_probabilities,
)


def test_one_win_has_a_closed_form():
    """Of two images i won n times: by symmetry p_j = 1 / p_i.

    The derivative of the likelihood with the prior is zero where n / (1 + x^2) = PRIOR (x - 1) / (x
    + 1).
    """
    n = 3.0
    x, y = strengths(np.array([[0.0, n], [0.0, 0.0]]))
    assert y == pytest.approx(1 / x, abs=1e-9)
    assert n / (1 + x * x) == pytest.approx(PRIOR * (x - 1) / (x + 1), abs=1e-9)
    assert strengths(np.zeros((3, 3))).tolist() == [1, 1, 1]


def test_strengths_maximize_the_likelihood():
    """A general optimizer maximizes the same likelihood, of 40 random comparisons of 7 images."""
    rng = np.random.default_rng(0)
    wins = np.zeros((7, 7))
    for _ in range(40):
        i, j = rng.choice(7, 2, replace=False)
        wins[i, j] += 1

    def unlikely(logs: np.ndarray) -> float:
        gap = logs[:, None] - logs
        prior = np.logaddexp(0, -logs) + np.logaddexp(0, logs)
        return float((wins * np.logaddexp(0, -gap)).sum() + PRIOR * prior.sum())

    found = minimize(unlikely, np.zeros(7), tol=1e-14).x
    np.testing.assert_allclose(np.log(strengths(wins)), found, atol=1e-5)


def test_a_ranking_counts_as_its_pairs():
    wins = count_wins(np.array([2, 0, 3]), 4)
    assert sorted(zip(*(axis.tolist() for axis in np.nonzero(wins)), strict=True)) == [
        (0, 3),
        (2, 0),
        (2, 3),
    ]
    assert wins.sum() == 3


def test_an_image_without_a_comparison_has_no_score():
    scores = win_probabilities(count_wins(np.array([1, 0]), 3))
    assert scores[1] > 0.5 > scores[0] and np.isnan(scores[2])
    assert scores[0] + scores[1] == pytest.approx(1)
    found = consistency(count_wins(np.array([1, 0]), 3), scores)
    assert found[:2].tolist() == [1, 1] and np.isnan(found[2])


def test_consistency_counts_upsets():
    """With 0 before 1 twice and after it once, two of three comparisons agree with the scores."""
    wins = np.array([[0.0, 2.0], [1.0, 0.0]])
    np.testing.assert_allclose(consistency(wins, win_probabilities(wins)), [2 / 3, 2 / 3])
    even = np.array([[0.0, 1.0], [1.0, 0.0]])
    assert win_probabilities(even).tolist() == [0.5, 0.5]
    assert consistency(even, win_probabilities(even)).tolist() == [0.5, 0.5]


@given(st.integers(2, 40), st.integers(2, 9), st.integers(1, 4), st.integers(0, 2**64 - 1))
def test_every_image_is_in_a_list_of_each_round(count, size, rounds, seed):
    lists = random_lists(count, size, rounds, seed)
    assert [each.tolist() for each in lists] == [
        each.tolist() for each in random_lists(count, size, rounds, seed)
    ]
    assert all(2 <= len(each) <= max(size, 2) and len(set(each)) == len(each) for each in lists)
    met = np.bincount(np.concatenate(lists), minlength=count)
    assert met.min() >= rounds and met.sum() - rounds * count <= rounds  # one more, if any


@given(st.permutations(range(9)), st.integers(2, 5), st.integers(0, 99))
def test_a_consistent_judge_ranks_best_first_and_worst_last(order, size, seed):
    """A ranking of all images gives the whole order; shorter ones say less.

    An image that beats strong ones and loses once may be below one that met only weak ones, but one
    that wins every comparison is above the average.
    """
    worth = np.empty(9)
    worth[list(order)] = np.arange(9)
    wins = sum(
        count_wins(rows[np.argsort(-worth[rows])], 9) for rows in random_lists(9, size, 3, seed)
    )
    scores = win_probabilities(wins)
    assert scores[order[-1]] > 0.5 > scores[order[0]]
    whole = win_probabilities(count_wins(np.array(order)[::-1], 9))
    assert np.argsort(whole).tolist() == list(order)
