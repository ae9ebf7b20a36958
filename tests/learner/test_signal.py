"""The cosine between gradients: closed forms and its expectation. Measuring it does not change the
trainer.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from learner.gradient_signal import gradient, mean_cosine
from tests.learner.tiny import identical, tiny_groups, tiny_trainer, training_state


def test_cosine_of_three_gradients_matches_a_manual_calculation():
    """The gradients are at 0, 60 and 90 degrees, so the cosines are 1/2, 0 and sqrt(3)/2. Without
    one gradient, a single pair remains: sqrt(3)/2, 0 or 1/2. Lengths do not matter.
    """
    rows = [torch.tensor([1.0, 0]), torch.tensor([1.0, math.sqrt(3)]), torch.tensor([0, 5.0])]
    actual, root = mean_cosine(rows), math.sqrt(3) / 2
    leave_one_out = np.array([root, 0, 0.5])
    assert actual.mean == pytest.approx((0.5 + root) / 3, abs=1e-7)
    expected = math.sqrt(2 / 3 * ((leave_one_out - leave_one_out.mean()) ** 2).sum())
    assert actual.stderr == pytest.approx(expected, abs=1e-7) and actual.batches == 3


def test_cosine_is_the_share_of_signal_and_its_error_is_realistic():
    """g = s + noise in 4,000 dimensions with |s|^2 / E|g|^2 = 0.2, and 200 measurements of 8
    batches. The mean of the measurements is within 4 standard errors of 0.2, plus 1 % for the ratio
    of expectations. The mean squared jackknife error is within a third of the variance between the
    measurements.
    """
    rng = np.random.default_rng(0)
    signal = math.sqrt(0.2 / 0.8) * np.ones(4000)
    result = [
        mean_cosine([torch.from_numpy(signal + rng.standard_normal(4000)) for _ in range(8)])
        for _ in range(200)
    ]
    means = np.array([estimate.mean for estimate in result])
    assert means.mean() == pytest.approx(0.2, abs=4 * means.std() / math.sqrt(200) + 0.002)
    mean_squared_error = np.mean([estimate.stderr**2 for estimate in result])
    assert 0.67 < mean_squared_error / means.var() < 1.5


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([torch.ones(2)] * 2, "2 batches: at least 3"),
        ([torch.ones(2), torch.zeros(2), torch.ones(2)], "a gradient is zero"),
    ],
)
def test_invalid_gradients_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        mean_cosine(rows)


def test_gradient_equals_that_of_the_update_and_changes_nothing(tiny_sd3_dir):
    """The norm of the gradient equals the norm that an update of one step reports before clipping,
    because batch and samples are the same. All gradients are summed in float32, so the tolerance is
    1e-5.
    """
    trainer, groups = tiny_trainer(tiny_sd3_dir), tiny_groups()
    before = training_state(trainer)
    result = gradient(trainer, 3, groups)
    assert result.shape == (trainer.trainable_parameters,) and identical(
        before, training_state(trainer)
    )
    assert all(p.grad is None for p in trainer.updater.trained.parameters.values())
    assert torch.equal(result, gradient(trainer, 3, groups))
    assert not torch.equal(result, gradient(trainer, 4, groups))
    metrics = trainer.update(3, groups)
    assert result.norm().item() == pytest.approx(metrics["grad_norm"], rel=1e-5)
