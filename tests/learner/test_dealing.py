"""Which optimizer step each sample goes to."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.training import Optimizer
from learner.step_assignment import TRIED, StepAssignment
from planning.waiting import NOBODY, Waiting, owners


def counts_of(dealt: np.ndarray, steps: int) -> np.ndarray:
    return np.bincount(dealt, minlength=steps)


@given(st.integers(1, 300), st.integers(1, 9), st.booleans(), st.integers(0, 2**64 - 1))
def test_steps_have_equal_numbers_to_one(total, steps, even, seed):
    dealt = StepAssignment(steps, even).assign(total, seed)
    counts = counts_of(dealt, min(steps, total))
    assert len(dealt) == total and len(counts) == min(steps, total)
    assert counts.max() - counts.min() <= 1 and counts.min() >= 1


@given(st.integers(2, 300), st.integers(2, 9), st.integers(0, 99), st.data())
def test_an_even_assignment_is_even_in_every_run_of_samples(total, steps, seed, data):
    dealt = StepAssignment(steps, True).assign(total, seed)
    first = data.draw(st.integers(0, total - 1))
    last = data.draw(st.integers(first + 1, total))
    counts = counts_of(dealt[first:last], min(steps, total))
    assert counts.max() - counts.min() <= (1 if first % min(steps, total) == 0 else 2)


def test_an_even_assignment_is_random():
    """Of 2,000 pairs about half are dealt the other way round: 5 standard deviations are 112."""
    dealt = StepAssignment(2, True).assign(4000, 1)
    assert abs(dealt[::2].sum() - 1000) < 112
    assert not np.array_equal(dealt, StepAssignment(2, True).assign(4000, 2))


def test_a_random_assignment_is_a_split_permutation():
    """The stream that runs have been dealt by since their first version."""
    order = np.random.Generator(np.random.Philox(key=7)).permutation(50)
    dealt = StepAssignment(3).assign(50, 7)
    for step, part in enumerate(np.array_split(order, 3)):
        assert np.array_equal(np.flatnonzero(dealt == step), np.sort(part))


def test_the_assignment_follows_the_settings():
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
def test_samples_have_the_owners_of_the_shared_update(prompts, replicas, share, expected):
    """As ``tests/cluster/test_sharing.py`` compares with what replicas are sent."""
    assert owners(prompts, 2, replicas, share).tolist() == expected


def test_waiting_of_two_replicas_is_known():
    """Two replicas with 4 samples each, 4 steps of 2: a step lasts 2 where one has both of its
    samples, 1 where each has one.
    """
    shared, dealing = owners(2, 4, 2, "prompts"), StepAssignment(4)
    dealt = dealing.assign(8, 5)
    steps = [shared[dealt == step] for step in range(4)]
    expected = sum(2 if len(set(step)) == 1 else 1 for step in steps)
    assert dealing.busiest(shared, 5) == expected
    mean = np.mean([dealing.busiest(shared, seed) for seed in range(TRIED)])
    assert dealing.slowdown(shared) == pytest.approx(mean / 4) and mean > 4


@pytest.mark.parametrize("share", ["prompts", "samples"])
@pytest.mark.parametrize(("replicas", "least"), [(8, 1.1), (48, 1.3)])
def test_replicas_wait_for_each_other_unless_the_assignment_is_even(replicas, least, share):
    """48 prompts of 24 samples, two steps, as FlowGRPO's presets have them."""
    assert Waiting(24, StepAssignment(2)).longer(48, replicas, share) > least
    assert Waiting(24, StepAssignment(2, True)).longer(48, replicas, share) == 1.0
    assert Waiting(24, StepAssignment()).longer(48, replicas, share) == 1.0
    assert NOBODY.longer(48, replicas, share) == 1.0
