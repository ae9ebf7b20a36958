"""The simulated judge: a perfect one finds the full contrast, a guessing one finds none."""

import numpy as np
import pytest

from bench.preference import IMAGES, contrast, main, simulate_prompt


def test_a_perfect_judge_with_a_full_list_finds_the_best():
    assert simulate_prompt(IMAGES, 1, 0.0, seed=3) == (1, pytest.approx(1.0))
    worth = np.arange(IMAGES, dtype=float)
    assert contrast(worth, worth) == IMAGES - 12 and contrast(worth, -worth) == 12 - IMAGES


def test_a_guessing_judge_finds_nothing():
    """The share of a random choice has a standard deviation of sqrt(2 / 12) / 3.2 = 0.13.

    It is the difference of two means of 12 worths each, over a contrast of 3.2 standard deviations.
    The limit is four standard errors of a mean of 20.
    """
    shares = [simulate_prompt(4, 3, 1e9, seed)[1] for seed in range(20)]
    assert abs(np.mean(shares)) < 4 * 0.13 / np.sqrt(20)


def test_the_command(capsys):
    assert main(["--draws", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and lines[2].startswith("size 4  rounds 3   72 requests  error 0: 0.9")
