"""From comparisons of a prompt's images to one score for each."""

from __future__ import annotations

import numpy as np

PRIOR = 0.5
"""Wins, and as many losses, of each image against an average one, before anything is compared: so
that an image that won or lost every comparison has a finite strength too.
"""
CLOSE = 1e-12
MOST_STEPS = 10_000


def drawn_lists(count: int, size: int, rounds: int, seed: int) -> list[np.ndarray]:
    """Lists of at most ``size`` and at least two of ``count`` >= 2 indices.

    In each round every index is in one list, and who is beside whom is drawn anew. Where one is
    left over it meets another one of its round.
    """
    drawn: list[np.ndarray] = []
    for rng in (np.random.default_rng((seed, number)) for number in range(rounds)):
        order = rng.permutation(count)
        lists = np.array_split(order, -(-count // size))
        drawn += [each if len(each) > 1 else np.append(each, order[0]) for each in lists]
    return drawn


def wins_of(ranking: np.ndarray, count: int) -> np.ndarray:
    """float64 [count, count]: entry (i, j) is 1 where i stands before j in a ranking, best first.

    A list of k counts as its k (k - 1) / 2 pairs.
    """
    wins = np.zeros((count, count))
    first, second = np.triu_indices(len(ranking), 1)
    wins[ranking[first], ranking[second]] = 1.0
    return wins


def strengths(wins: np.ndarray) -> np.ndarray:
    """Bradley-Terry strengths float64 [N] of wins float64 [N, N]: how often i beat j.

    P(i beats j) = p_i / (p_i + p_j) (Bradley & Terry, Biometrika 1952), where an average image has
    p = 1. Found by the minorise-maximise steps of Hunter (Annals of Statistics 2004, eq. 3), with
    ``PRIOR`` for each image.
    """
    met, won = wins + wins.T, wins.sum(1) + PRIOR
    p = np.ones(len(wins))
    for _ in range(MOST_STEPS):
        before = p
        p = won / ((met / (p[:, None] + p)).sum(1) + 2 * PRIOR / (p + 1))
        if np.abs(p - before).max() <= CLOSE * p.max():
            break
    return p


def chances(wins: np.ndarray) -> np.ndarray:
    """float32 [N]: the chance of each to win against an average one; NaN where it met nobody."""
    p = strengths(wins)
    met = (wins + wins.T).sum(1) > 0
    return np.where(met, p / (p + 1), np.nan).astype(np.float32)


def consistency(wins: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """float32 [N]: the share of an image's comparisons that came out as ``scores`` order them.

    Half of all where a judge answers at random or by place; NaN where there was none.
    """
    right = (scores[:, None] > scores) + 0.5 * (scores[:, None] == scores)
    agreed = (wins * right).sum(1) + (wins * right).sum(0)
    met = (wins + wins.T).sum(1)
    return np.divide(agreed, met, out=np.full(len(met), np.nan), where=met > 0).astype(np.float32)
