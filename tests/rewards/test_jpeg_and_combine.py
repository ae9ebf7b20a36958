"""JPEG sizes compared with the file format, and weighted sums with arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from configs.rewards import Rewards
from configs.rewards import Scorer as ScorerConfig
from rewards import ScorerError, build
from rewards.combine import WeightedScorer, combine

GRAY_16 = np.full((1, 3, 16, 16), 128, np.uint8)


def jpeg(name: str, **settings):
    return build(ScorerConfig(name=name, settings=settings))


def test_the_jpeg_size_of_a_gray_image_follows_the_standard():
    """By ITU-T T.81 the header has 625 bytes, and the data of a grey image 4.

    Header: SOI 2 + JFIF APP0 18 + two DQT 69 each + SOF0 19 + DHT 33, 183, 33, 183 + SOS 14 + EOI
    2. Level 128 codes every coefficient as zero: with 2x2 chroma subsampling one 16x16 unit is 4
    luma blocks of 2 + 4 bits (DC category 0, end of block) and 2 chroma blocks of 2 + 2 bits: 32
    bits.
    """
    size = jpeg("jpeg_incompressibility")(GRAY_16, [""], [{}])
    assert size.dtype == np.float32 and size.tolist() == [np.float32(0.629)]


def test_compressibility_is_the_negative_and_decreases_with_detail():
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (1, 3, 16, 16), dtype=np.uint8)
    images = np.concatenate([GRAY_16, noise])
    more = jpeg("jpeg_incompressibility")(images, [""] * 2, [{}] * 2)
    less = jpeg("jpeg_compressibility")(images, [""] * 2, [{}] * 2)
    assert (more == -less).all() and more[1] > more[0]
    coarse = jpeg("jpeg_incompressibility", quality=10)(images, [""] * 2, [{}] * 2)
    assert coarse[1] < more[1]


def test_channels_are_not_mixed_with_rows():
    """An image with one vertical edge has the size that its red and blue channels imply."""
    image = np.zeros((1, 3, 16, 16), np.uint8)
    # pure red: three constant planes, no AC coefficient, a few DC bits after 625 header bytes
    image[:, 0] = 255
    assert 0.625 < jpeg("jpeg_incompressibility")(image, [""], [{}])[0] < 0.640


def test_combine_is_the_weighted_sum_and_missing_stays_missing():
    scores = {
        "a": np.array([1.0, 2.0, np.nan], np.float32),
        "b": np.array([10.0, np.nan, 1.0], np.float32),
    }
    total = combine(scores, {"a": 0.5, "b": -2.0})
    assert total.dtype == np.float32 and total[0] == -19.5 and np.isnan(total[1:]).all()
    # a weight of 0 does not hide a failure
    assert np.isnan(combine(scores, {"a": 1.0, "b": 0.0})[1])


def test_combine_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="every scorer needs a score and a weight"):
        combine({"a": np.zeros(2)}, {"b": 1.0})
    with pytest.raises(ValueError, match="different numbers"):
        combine({"a": np.zeros(2), "b": np.zeros(3)}, {"a": 1.0, "b": 1.0})
    with pytest.raises(ValueError, match="at least one"):
        combine({}, {})


def test_weighted_scorer_from_a_configuration():
    rewards = Rewards(
        scorers=(
            ScorerConfig(name="jpeg_compressibility", weight=2.0),
            ScorerConfig(name="jpeg_incompressibility"),
        )
    )
    scored = WeightedScorer.from_config(rewards)(GRAY_16, [""], [{}])
    assert set(scored.scores) == {"jpeg_compressibility", "jpeg_incompressibility"}
    assert scored.total.tolist() == [np.float32(-0.629)]  # -2 x 0.629 + 0.629


def test_a_scorer_that_fails_is_named():
    def raises(images, prompts, metadata):
        raise KeyError("objects")

    with pytest.raises(ScorerError, match="'bad' raised KeyError: 'objects'"):
        WeightedScorer({"bad": raises}, {"bad": 1.0})(GRAY_16, [""], [{}])
    with pytest.raises(ScorerError, match=r"'bad' returned nan for image 0 of 1"):
        WeightedScorer({"bad": lambda *_: [np.nan]}, {"bad": 1.0})(GRAY_16, [""], [{}])


@pytest.mark.parametrize(
    ("parts", "kept", "message"),
    [
        ({"a": 0.5, "b": [1.0, 2.0]}, {"own/b": [1.0, 2.0]}, "has a part 'a' that is not float32"),
        ({"a": [1.0, 2.0, 3.0]}, {}, "has a part 'a' that is not float32 [2]"),
        ({"a": ["red", "blue"]}, {}, "has a part 'a' that is not float32 [2]"),
        ([1.0, 2.0], {}, "has parts of type list, not a dict of float32 [2]"),
    ],
)
def test_invalid_parts_are_reported_and_scores_are_kept(parts, kept, message):
    """Values that are only logged must not end a run."""

    class Own:
        def __call__(self, images, prompts, metadata):
            self.parts = parts
            return np.ones(len(images), np.float32)

    made = WeightedScorer({"own": Own()}, {"own": 1.0}).attempt(
        np.zeros((2, 3, 4, 4), np.uint8), ["a", "b"], [{}, {}]
    )
    assert made.scores["own"].tolist() == [1.0, 1.0]
    assert {name: values.tolist() for name, values in made.parts.items()} == kept
    (failure,) = made.failures
    assert failure.startswith(f"scorer 'own' {message}")


def test_parts_are_logged_under_the_scorers_label():
    class WithParts:
        def __call__(self, images, prompts, metadata):
            self.parts = {"colours": np.ones(len(images), np.float32)}
            return np.zeros(len(images), np.float32)

    scored = WeightedScorer({"own": WithParts()}, {"own": 1.0})(GRAY_16, [""], [{}])
    assert scored.parts["own/colours"].tolist() == [1.0]
