"""How well does a judge that compares find the best and the worst images? ``python -m bench
preference``.

Simulated: images whose worth is normal, and a judge that sees it with an error of so many standard
deviations. The contrast of the images that its scores find, as a share of the largest one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from rewards.preference import chances, drawn_lists, wins_of

IMAGES, KEPT = 96, 12
SHAPES = ((2, 3), (4, 1), (4, 3), (8, 1), (8, 3), (8, 6))
"""Images of a list, rounds."""
ERRORS = (0.0, 1.0)


def found(size: int, rounds: int, error: float, seed: int) -> tuple[int, float]:
    """(requests, share of the contrast) of one prompt."""
    rng = np.random.default_rng(seed)
    worth = rng.normal(size=IMAGES)
    lists = drawn_lists(IMAGES, size, rounds, seed)
    wins = np.zeros((IMAGES, IMAGES))
    for rows in lists:
        seen = worth[rows] + error * rng.normal(size=len(rows))
        wins += wins_of(rows[np.argsort(-seen)], IMAGES)
    return len(lists), contrast(worth, chances(wins)) / contrast(worth, worth)


def contrast(worth: np.ndarray, scores: np.ndarray) -> float:
    """Mean worth of the best by ``scores`` less that of the worst."""
    order = np.argsort(scores)
    return float(worth[order[-KEPT:]].mean() - worth[order[:KEPT]].mean())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each size and number of rounds; 0."""
    parser = argparse.ArgumentParser(prog="python -m bench preference", description=__doc__)
    parser.add_argument("--draws", type=int, default=20)
    draws = parser.parse_args(arguments).draws
    for size, rounds in SHAPES:
        told = [f"size {size}  rounds {rounds}"]
        for error in ERRORS:
            made = [found(size, rounds, error, seed) for seed in range(draws)]
            shares = np.array([share for _, share in made])
            told += [] if error else [f"{made[0][0]:3} requests"]
            told.append(
                f"error {error:g}: {shares.mean():.2f} +- {shares.std() / np.sqrt(draws):.3f}"
            )
        print("  ".join(told))
    return 0
