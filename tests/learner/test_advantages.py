"""Advantages and schedules are compared with manual calculations."""

from __future__ import annotations

import numpy as np
import pytest

from configs.rewards import Advantages
from configs.running import Stop
from configs.training import OldPolicy, Optimizer
from learner.advantages import advantages
from learner.schedules import learning_rate, old_policy_decay, stop_reason

RULE = Advantages(std="global", eps=1e-4)
GROUPS = [np.array([1.0, 3.0]), np.array([0.0, 0.0]), np.array([2.0, 6.0, 4.0])]


def test_global_std_matches_a_manual_calculation():
    """The seven rewards have mean 16/7 and mean square 66/7, so the variance is 66/7 - 256/49 =
    206/49.
    """
    values, metrics = advantages(GROUPS, Advantages(std="global", eps=0.5))
    std = np.sqrt(206) / 7
    assert values[0].dtype == np.float32
    # float32 rounding is 6e-8
    np.testing.assert_allclose(values[0], np.array([-1, 1]) / (std + 0.5), rtol=1e-7)
    np.testing.assert_allclose(values[2], np.array([-2, 2, 0]) / (std + 0.5), rtol=1e-7)
    assert values[1].tolist() == [0.0, 0.0]
    assert metrics == {"zero_std_ratio": 1 / 3}


def test_group_std_matches_a_manual_calculation():
    values, _ = advantages(GROUPS, Advantages(std="group", eps=1e-4))
    np.testing.assert_allclose(values[0], np.array([-1, 1]) / 1.0001, rtol=1e-6)
    np.testing.assert_allclose(values[2], np.array([-2, 2, 0]) / (np.sqrt(8 / 3) + 1e-4), rtol=1e-6)


def test_advantages_of_equal_rewards_are_exactly_zero():
    rewards = np.full(3, 0.1, np.float32)
    values, metrics = advantages([rewards, np.array([0.0, 1.0])], RULE)
    assert values[0].tolist() == [0.0] * 3 and metrics["zero_std_ratio"] == 0.5
    values, metrics = advantages([np.array([0.7])], RULE)  # one sample is a group of equal rewards
    assert values[0].tolist() == [0.0] and metrics["zero_std_ratio"] == 1


@pytest.mark.parametrize("bad", [[np.nan, 1.0], [np.inf, 1.0], []])
def test_missing_or_non_finite_rewards_are_refused(bad):
    with pytest.raises(ValueError, match="group 1"):
        advantages([np.array([0.0, 1.0]), np.array(bad)], RULE)


def test_empty_list_of_groups_is_refused():
    with pytest.raises(ValueError, match="at least one prompt"):
        advantages([], RULE)


def test_learning_rate_schedules():
    rates = [
        learning_rate(Optimizer(lr=1.0, schedule="linear", warmup_iterations=2), done, 6)
        for done in range(6)
    ]
    assert rates == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert [
        learning_rate(Optimizer(lr=1.0, warmup_iterations=4), done, 6) for done in range(6)
    ] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert learning_rate(Optimizer(lr=1.0, schedule="linear", warmup_iterations=9), 8, 9) == 1.0


def test_old_policy_decays():
    assert [old_policy_decay(OldPolicy(schedule="linear_cap"), s) for s in (1, 100, 500, 900)] == [
        0.001,
        0.1,
        0.5,
        0.5,
    ]
    assert old_policy_decay(OldPolicy(schedule="constant", value=0.3), 7) == 0.3
    delayed = OldPolicy(schedule="delayed_linear_cap", slope=0.0075, cap=0.999, delay=75)
    assert [old_policy_decay(delayed, s) for s in (1, 75, 77, 500)] == [0.0, 0.0, 0.015, 0.999]


def test_stop_reasons_name_the_exceeded_limit():
    assert stop_reason(Stop(), {"loss/kl": 1e9}, 1e9) is None
    assert "above stop.max_kl = 0.5" in stop_reason(Stop(max_kl=0.5), {"loss/kl": 0.6}, 0)
    assert stop_reason(Stop(max_kl=0.5), {"loss/kl": 0.5}, 0) is None
    assert stop_reason(Stop(max_kl=0.5), {}, 0) is None
    assert "stop.max_minutes = 2" in stop_reason(Stop(max_minutes=2), {}, 2.0)
    assert stop_reason(Stop(max_minutes=2), {}, 1.9) is None
