"""Scores of a prompt's images from comparisons of them (Bradley-Terry model)."""

from __future__ import annotations

import numpy as np

PRIOR = 0.5
"""Prior number of wins, and of losses, of each image against an average one. It keeps the strength
of an image finite that won or lost every comparison.
"""
CLOSE = 1e-12
MAX_STEPS = 10_000


def random_lists(count: int, size: int, rounds: int, seed: int) -> list[np.ndarray]:
    """Draw random lists of 2 to ``size`` of ``count`` >= 2 indices.

    Each round shuffles the indices and divides them into lists, so that every index is in one list.
    An index that would be alone is joined by another one of its round.
    """
    drawn: list[np.ndarray] = []
    for rng in (np.random.default_rng((seed, number)) for number in range(rounds)):
        order = rng.permutation(count)
        lists = np.array_split(order, -(-count // size))
        drawn += [
            members if len(members) > 1 else np.append(members, order[0]) for members in lists
        ]
    return drawn


def count_wins(ranking: np.ndarray, count: int) -> np.ndarray:
    """Return float64 [count, count]: entry (i, j) is 1 if i precedes j in a ranking, best first.

    A ranking of k images counts as k (k - 1) / 2 comparisons.
    """
    wins = np.zeros((count, count))
    first, second = np.triu_indices(len(ranking), 1)
    wins[ranking[first], ranking[second]] = 1.0
    return wins


def strengths(wins: np.ndarray) -> np.ndarray:
    """Return Bradley-Terry strengths float64 [N], given how often i beat j, float64 [N, N].

    P(i beats j) = p_i / (p_i + p_j) (Bradley & Terry, Biometrika 1952), where an average image has
    p = 1. Computed by the minorization-maximization steps of Hunter (Annals of Statistics 2004,
    eq. 3), with ``PRIOR`` for each image.
    """
    comparisons, won = wins + wins.T, wins.sum(1) + PRIOR
    p = np.ones(len(wins))
    for _ in range(MAX_STEPS):
        before = p
        p = won / ((comparisons / (p[:, None] + p)).sum(1) + 2 * PRIOR / (p + 1))
        if np.abs(p - before).max() <= CLOSE * p.max():
            break
    return p


def win_probabilities(wins: np.ndarray) -> np.ndarray:
    """Return each image's probability to beat an average one, float32 [N]; NaN if not compared."""
    p = strengths(wins)
    compared = (wins + wins.T).sum(1) > 0
    return np.where(compared, p / (p + 1), np.nan).astype(np.float32)


def consistency(wins: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return the share of each image's comparisons that agree with ``scores``, float32 [N].

    It is about one half if a judge answers at random or by position; NaN if there was none.
    """
    agreement = (scores[:, None] > scores) + 0.5 * (scores[:, None] == scores)
    agreed = (wins * agreement).sum(1) + (wins * agreement).sum(0)
    comparisons = (wins + wins.T).sum(1)
    return np.divide(
        agreed, comparisons, out=np.full(len(comparisons), np.nan), where=comparisons > 0
    ).astype(np.float32)
