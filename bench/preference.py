"""Simulate how well a comparing judge finds the best and the worst images.

The true quality of images is normally distributed, and the judge observes it with an error of the
given standard deviations. Printed is the contrast of the images that its scores select, as a share
of the largest possible one. Run by ``python -m bench preference``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from rewards.preference import count_wins, random_lists, win_probabilities

IMAGES, KEPT = 96, 12
SHAPES = ((2, 3), (4, 1), (4, 3), (8, 1), (8, 3), (8, 6))
"""(images per list, rounds)."""
ERRORS = (0.0, 1.0)


def simulate_prompt(size: int, rounds: int, error: float, seed: int) -> tuple[int, float]:
    """Simulate one prompt; return (requests, share of the largest contrast)."""
    rng = np.random.default_rng(seed)
    quality = rng.normal(size=IMAGES)
    lists = random_lists(IMAGES, size, rounds, seed)
    wins = np.zeros((IMAGES, IMAGES))
    for rows in lists:
        observed = quality[rows] + error * rng.normal(size=len(rows))
        wins += count_wins(rows[np.argsort(-observed)], IMAGES)
    return len(lists), contrast(quality, win_probabilities(wins)) / contrast(quality, quality)


def contrast(worth: np.ndarray, scores: np.ndarray) -> float:
    """Return the mean quality of the best images by ``scores`` minus that of the worst."""
    order = np.argsort(scores)
    return float(worth[order[-KEPT:]].mean() - worth[order[:KEPT]].mean())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each list size and number of rounds; return 0."""
    parser = argparse.ArgumentParser(prog="python -m bench preference", description=__doc__)
    parser.add_argument("--draws", type=int, default=20)
    draws = parser.parse_args(arguments).draws
    for size, rounds in SHAPES:
        cells = [f"size {size}  rounds {rounds}"]
        for error in ERRORS:
            results = [simulate_prompt(size, rounds, error, seed) for seed in range(draws)]
            shares = np.array([share for _, share in results])
            cells += [] if error else [f"{results[0][0]:3} requests"]
            cells.append(
                f"error {error:g}: {shares.mean():.2f} +- {shares.std() / np.sqrt(draws):.3f}"
            )
        print("  ".join(cells))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
