"""Seeds and noise: equal on every machine, independent of other rows, and distinct for every
purpose.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policy.sampling.noise import PURPOSES, noise_for, stream_seed, stream_seeds

SEED = st.integers(0, 2**64 - 1)
GOLDEN = [
    1066122360,
    1055482398,
    1060350078,
    1049748505,
    3218386491,
    1068538216,
    1046636260,
    3210184054,
]
GOLDEN_SEED = 0x1A8D08E1CA8873A


def test_noise_has_golden_values():
    """The noise has these golden values. Published numbers depend on it, so another numpy version
    must give the same values.
    """
    noise = noise_for([1, 2**63 + 5], (2, 2))
    assert noise.dtype == torch.float32 and noise.device.type == "cpu"
    np.testing.assert_array_equal(noise.numpy().ravel().view(np.uint32), GOLDEN)


@given(st.lists(SEED, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_row_of_noise_depends_only_on_its_seed(seeds, random):
    alone = {seed: noise_for([seed], (3, 2))[0] for seed in seeds}
    random.shuffle(seeds)
    for seed, row in zip(seeds, noise_for(seeds, (3, 2)), strict=True):
        assert torch.equal(row, alone[seed])


@given(SEED, st.integers(0, 63))
def test_every_bit_of_a_seed_counts(seed, bit):
    """The CPU generator of torch ignores the upper 32 bits, so this test would fail with it."""
    assert not torch.equal(noise_for([seed], (8,)), noise_for([seed ^ (1 << bit)], (8,)))


def test_noise_is_standard_normal():
    """With n = 2^18 values, the standard error of the mean is 1/512, of the variance sqrt(2)/512,
    and of the fourth moment sqrt(96)/512. The test allows 5 standard errors.
    """
    values = noise_for([stream_seed(0, "test", i) for i in range(64)], (4096,)).double()
    error = 5 / 512
    assert abs(values.mean()) < error
    assert abs(values.square().mean() - 1) < error * 2**0.5
    assert abs(values.pow(4).mean() - 3) < error * 96**0.5


def test_no_seeds_give_no_rows():
    assert noise_for([], (4, 2)).shape == (0, 4, 2)


@given(
    st.integers(0, 2**63 - 1),
    st.lists(st.integers(0, 10**9), max_size=4),
    st.integers(0, 2**63 - 1),
)
def test_seeds_of_different_purposes_never_coincide(run_seed, index, other):
    assert (
        stream_seed(run_seed, "explore", *index) >> 56
        != stream_seed(other, "evaluate", *index) >> 56
    )
    assert 0 <= stream_seed(run_seed, "evaluate", *index) < 2**64


def test_every_purpose_has_its_own_top_byte():
    assert len({stream_seed(7, purpose, 1, 2) >> 56 for purpose in PURPOSES}) == len(PURPOSES)


def test_seeds_have_golden_values_and_are_distinct():
    assert stream_seed(0, "explore", 1, 2, 3) == GOLDEN_SEED
    seeds = {
        stream_seed(0, "explore", i, p, n) for i in range(10) for p in range(10) for n in range(100)
    }
    assert len(seeds) == 10_000
    assert (
        stream_seed(1, "explore", 11)
        != stream_seed(11, "explore", 1)
        != stream_seed(1, "explore", 1, 1)
    )


def test_unknown_purpose_is_refused():
    with pytest.raises(
        ValueError, match="unknown seed purpose 'exploration': use one of explore, "
    ):
        stream_seed(0, "exploration")


def test_many_seeds_equal_the_seeds_computed_one_by_one():
    many = stream_seeds(30, 7, "explore", 3, 1)
    assert many == tuple(stream_seed(7, "explore", 3, 1, n) for n in range(30))
    with pytest.raises(ValueError, match="unknown seed purpose 'lunch'"):
        stream_seeds(1, 7, "lunch")
