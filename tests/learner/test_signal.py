"""The cosine between gradients: closed forms, its expectation; the trainer stays as it is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from learner.gradient_signal import gradient, mean_cosine
from tests.learner.tiny import everything, identical, tiny_groups, tiny_trainer


def test_three_gradients_with_known_angles():
    """At 0, 60 and 90 degrees: cosines 1/2, 0, sqrt(3)/2. Leaving out one leaves a single pair:
    sqrt(3)/2, 0, 1/2. Lengths do not matter.
    """
    rows = [torch.tensor([1.0, 0]), torch.tensor([1.0, math.sqrt(3)]), torch.tensor([0, 5.0])]
    found, root = mean_cosine(rows), math.sqrt(3) / 2
    left = np.array([root, 0, 0.5])
    assert found.mean == pytest.approx((0.5 + root) / 3, abs=1e-7)
    expected = math.sqrt(2 / 3 * ((left - left.mean()) ** 2).sum())
    assert found.stderr == pytest.approx(expected, abs=1e-7) and found.batches == 3


def test_the_cosine_equals_the_signal_share_within_its_error():
    """g = s + noise in 4,000 dimensions with |s|^2 / E|g|^2 = 0.2; 200 measurements of 8 batches:
    their mean within 4 standard errors of 0.2 (and 1 % for the ratio of expectations), and the
    jackknife's square on average the variance between them, within a third.
    """
    rng = np.random.default_rng(0)
    signal = math.sqrt(0.2 / 0.8) * np.ones(4000)
    found = [
        mean_cosine([torch.from_numpy(signal + rng.standard_normal(4000)) for _ in range(8)])
        for _ in range(200)
    ]
    means = np.array([one.mean for one in found])
    assert means.mean() == pytest.approx(0.2, abs=4 * means.std() / math.sqrt(200) + 0.002)
    recorded = np.mean([one.stderr**2 for one in found])
    assert 0.67 < recorded / means.var() < 1.5


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([torch.ones(2)] * 2, "2 batches: at least 3"),
        ([torch.ones(2), torch.zeros(2), torch.ones(2)], "a gradient is zero"),
    ],
)
def test_incomparable_gradients_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        mean_cosine(rows)


def test_the_gradient_is_that_of_the_update_and_changes_nothing(tiny_sd3_dir):
    """Its length is what an update of one step reports before clipping; the same batch, the same
    samples. All gradients are summed in float32: 1e-5.
    """
    trainer, groups = tiny_trainer(tiny_sd3_dir), tiny_groups()
    before = everything(trainer)
    found = gradient(trainer, 3, groups)
    assert found.shape == (trainer.trainable_parameters,) and identical(before, everything(trainer))
    assert all(p.grad is None for p in trainer.updater.trained.parameters.values())
    assert torch.equal(found, gradient(trainer, 3, groups))
    assert not torch.equal(found, gradient(trainer, 4, groups))
    metrics = trainer.update(3, groups)
    assert found.norm().item() == pytest.approx(metrics["grad_norm"], rel=1e-5)
