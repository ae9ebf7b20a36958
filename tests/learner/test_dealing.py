"""The assignment of samples to optimizer steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.training import Optimizer
from learner.step_assignment import TRIED, StepAssignment
from planning.waiting import NOBODY, Waiting, owners


def counts_of(assigned: np.ndarray, steps: int) -> np.ndarray:
    return np.bincount(assigned, minlength=steps)


@given(st.integers(1, 300), st.integers(1, 9), st.booleans(), st.integers(0, 2**64 - 1))
def test_steps_get_numbers_of_samples_that_differ_by_at_most_one(total, steps, even, seed):
    assigned = StepAssignment(steps, even).assign(total, seed)
    counts = counts_of(assigned, min(steps, total))
    assert len(assigned) == total and len(counts) == min(steps, total)
    assert counts.max() - counts.min() <= 1 and counts.min() >= 1


@given(st.integers(2, 300), st.integers(2, 9), st.integers(0, 99), st.data())
def test_even_assignment_is_even_in_every_range_of_samples(total, steps, seed, data):
    assigned = StepAssignment(steps, True).assign(total, seed)
    first = data.draw(st.integers(0, total - 1))
    last = data.draw(st.integers(first + 1, total))
    counts = counts_of(assigned[first:last], min(steps, total))
    assert counts.max() - counts.min() <= (1 if first % min(steps, total) == 0 else 2)


def test_even_assignment_is_random():
    """About half of 2,000 pairs are assigned in the reverse order. Five standard deviations are
    112.
    """
    assigned = StepAssignment(2, True).assign(4000, 1)
    assert abs(assigned[::2].sum() - 1000) < 112
    assert not np.array_equal(assigned, StepAssignment(2, True).assign(4000, 2))


def test_random_assignment_is_a_permutation_cut_into_steps():
    """All versions assign samples with this random stream, since the first."""
    order = np.random.Generator(np.random.Philox(key=7)).permutation(50)
    assigned = StepAssignment(3).assign(50, 7)
    for step, part in enumerate(np.array_split(order, 3)):
        assert np.array_equal(np.flatnonzero(assigned == step), np.sort(part))


def test_settings_determine_the_assignment():
    assert StepAssignment.of(Optimizer(steps_per_iteration=3)) == StepAssignment(3, False)
    assert StepAssignment.of(Optimizer(steps_per_iteration=2, deal="even")) == StepAssignment(
        2, True
    )


@pytest.mark.parametrize(
    ("prompts", "replicas", "share", "expected"),
    [
        (3, 2, "prompts", [0, 0, 1, 1, 0, 0]),
        (3, 4, "samples", [0, 1, 1, 2, 3, 3]),
        (3, 3, "samples", [0, 0, 1, 1, 2, 2]),
    ],
)
def test_owners_of_samples(prompts, replicas, share, expected):
    """``tests/cluster/test_sharing.py`` compares this with the samples that are sent to
    replicas.
    """
    assert owners(prompts, 2, replicas, share).tolist() == expected


def test_waiting_of_replicas_matches_a_manual_calculation():
    """Two replicas have 4 samples each, and 4 steps have 2 samples each. A step lasts 2 if one
    replica has both of its samples, and 1 if each replica has one.
    """
    owner_of_sample, dealing = owners(2, 4, 2, "prompts"), StepAssignment(4)
    assigned = dealing.assign(8, 5)
    steps = [owner_of_sample[assigned == step] for step in range(4)]
    expected = sum(2 if len(set(step)) == 1 else 1 for step in steps)
    assert dealing.busiest(owner_of_sample, 5) == expected
    mean = np.mean([dealing.busiest(owner_of_sample, seed) for seed in range(TRIED)])
    assert dealing.slowdown(owner_of_sample) == pytest.approx(mean / 4) and mean > 4


@pytest.mark.parametrize("share", ["prompts", "samples"])
@pytest.mark.parametrize(("replicas", "lower_bound"), [(8, 1.1), (48, 1.3)])
def test_replicas_wait_for_each_other_unless_the_assignment_is_even(replicas, lower_bound, share):
    """48 prompts of 24 samples and two steps, as in the presets of FlowGRPO."""
    assert Waiting(24, StepAssignment(2)).longer(48, replicas, share) > lower_bound
    assert Waiting(24, StepAssignment(2, True)).longer(48, replicas, share) == 1.0
    assert Waiting(24, StepAssignment()).longer(48, replicas, share) == 1.0
    assert NOBODY.longer(48, replicas, share) == 1.0
