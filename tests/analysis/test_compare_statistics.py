"""The arithmetic of a comparison, computed by hand."""

import math

import pytest

from analysis.compare.statistics import CurvePoint, Mean, mean_of, paired, speed_up, time_to


def test_mean_and_standard_error_of_known_values():
    # deviations -1, 0, 1: s^2 = 2 / 2 = 1, standard error 1 / sqrt(3)
    assert mean_of([1.0, 2.0, 3.0]) == Mean(2.0, pytest.approx(1 / math.sqrt(3), rel=1e-15), 3)
    assert mean_of([5.0]).mean == 5.0 and math.isnan(mean_of([5.0]).error)
    assert mean_of([]).count == 0 and math.isnan(mean_of([]).mean)


def test_pairing_removes_effects_of_the_seed():
    """Seeds that move both by 1, 5, -3 leave differences 0.1, 0.2, 0.3: mean 0.2, standard error
    0.1 / sqrt(3).
    """
    shifts = {0: 1.0, 1: 5.0, 2: -3.0, 9: 0.0}
    ours = {seed: shift + 0.1 * (seed + 1) for seed, shift in shifts.items() if seed < 3} | {
        7: 99.0
    }
    found = paired(ours, shifts)
    assert found.count == 3  # seed 7 has no partner
    assert found.mean == pytest.approx(0.2, abs=1e-12)
    assert found.error == pytest.approx(0.1 / math.sqrt(3), abs=1e-12)
    assert mean_of([ours[seed] for seed in range(3)]).error > 20 * found.error


def test_speed_up_is_a_ratio_of_means():
    # the method's paper, FLUX.1
    assert speed_up(Mean(169.0, 1.0, 3), Mean(274.0, 2.0, 3)) == pytest.approx(1.62, abs=0.002)
    assert math.isnan(speed_up(mean_of([]), mean_of([1.0])))


def curve(*points: tuple[float, float]) -> list[CurvePoint]:
    return [
        CurvePoint(i, mean_of([s]), mean_of([g]), mean_of([g])) for i, (s, g) in enumerate(points)
    ]


def test_time_to_a_gain_is_interpolated_linearly():
    found = curve((0, 0.0), (10, 0.2), (20, 0.1), (30, 0.4))
    assert time_to(found, 0.05) == pytest.approx(2.5)
    # first reached there; it falls again later
    assert time_to(found, 0.2) == pytest.approx(10.0)
    assert time_to(found, 0.25) == pytest.approx(25.0)
    assert time_to(found, 0.4) == pytest.approx(30.0)
    assert time_to(found, 0.41) is None
    assert time_to(found, 0.0) is None
    assert time_to(found, -1.0) is None
    assert time_to(found, math.nan) is None
    # two points without the curve between them
    assert time_to(curve((0, 0.0), (30, 0.4)), 0.1) is None


def test_an_unknown_value_makes_the_mean_unknown():
    """It is the seconds of an iteration whose row is damaged; statistics.stdev raised
    AttributeError.
    """
    unknown = mean_of([1.0, math.nan])
    assert math.isnan(unknown.mean) and math.isnan(unknown.error) and unknown.count == 2
