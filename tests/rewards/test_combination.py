"""Floors, normalization over a group, optional scorers, and the cache of scores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.rewards import Rewards
from configs.rewards import Scorer as ScorerConfig
from rewards.cache import ScoreCache
from rewards.combine import Combination, WeightedScorer, combine, rank, zscore
from rewards.images import cached_per_batch

NAN = np.nan
floats = st.lists(st.integers(-50, 50).map(float), min_size=1, max_size=12)


def near(values, expected) -> bool:
    return np.allclose(
        np.asarray(values, np.float64), np.asarray(expected, np.float64), atol=1e-6, equal_nan=True
    )


def test_zscore_and_rank_of_known_scores():
    values = np.array([1.0, 3.0, 5.0, 3.0])
    assert near(zscore(values), [-np.sqrt(2), 0, np.sqrt(2), 0])  # mean 3, deviation sqrt(2)
    assert near(rank(values), [-1, 0, 1, 0])  # places 0, 1.5, 3, 1.5 of 3, spread over [-1, 1]
    assert near(zscore(np.full(3, 0.1)), [0, 0, 0])
    assert near(rank(np.full(3, 7.0)), [0, 0, 0])
    assert near(rank(np.ones(1)), [0])


@given(floats, st.integers(1, 9), st.integers(-9, 9))
def test_normalized_scores_do_not_depend_on_scale_and_origin(values, scale, origin):
    values = np.array(values)
    assert np.allclose(zscore(values), zscore(scale * values + origin), atol=1e-9)
    assert np.array_equal(rank(values), rank(scale * values + origin))
    assert np.allclose(rank(-values), -rank(values)) and abs(rank(values).mean()) < 1e-12


def test_without_options_the_reward_is_the_weighted_sum():
    rng = np.random.default_rng(0)
    scores = {label: rng.normal(size=50).astype(np.float32) for label in "abc"}
    weights = {"a": 0.3, "b": -1.7, "c": 0.0}
    assert np.array_equal(
        Combination(weights)(scores | {"held_out": scores["a"]}), combine(scores, weights)
    )


@given(st.lists(st.tuples(*[st.sampled_from([0.0, 2.0, NAN])] * 3), min_size=1, max_size=8))
def test_images_without_a_reward_are_known_before_combining(rows):
    """Scorers are a, b and c, of which c is optional, has a floor, or all are normalized."""
    columns = zip(*rows, strict=True)
    scores = {label: np.float32(column) for label, column in zip("abc", columns, strict=True)}
    weights = {"a": 1.0, "b": -2.0, "c": 0.5}
    for combination in (
        Combination(weights),
        Combination(weights, {"c": 1.0}, frozenset("c")),
        Combination(weights, optional=frozenset("abc")),
        Combination(weights, {"a": 1.0}, frozenset("c"), "rank"),
    ):
        assert combination.missing(scores) == np.isnan(combination(scores)).sum()


def test_a_floor_raises_scores_but_does_not_replace_missing_ones():
    assert near(Combination({"a": 2.0}, {"a": 1.0})({"a": np.float32([-5, 3, NAN])}), [2, 6, NAN])


def test_normalization_is_over_the_images_that_have_a_reward():
    scores = {"a": np.float32([1, 3, 100, 5]), "b": np.float32([10, 20, NAN, 60])}
    made = Combination({"a": 1.0, "b": 0.5}, normalize="zscore")(scores)
    three = Combination({"a": 1.0, "b": 0.5}, normalize="zscore")(
        {k: v[[0, 1, 3]] for k, v in scores.items()}
    )
    assert near(made, [three[0], three[1], NAN, three[2]])
    # a: mean 3, deviation sqrt(8/3); b: mean 30, deviation sqrt(1400/3)
    assert near(made[:2], [-2 / np.sqrt(8 / 3) - 10 / np.sqrt(1400 / 3), -5 / np.sqrt(1400 / 3)])
    assert near(Combination({"a": 1.0, "b": 2.0}, normalize="rank")(scores), [-3, 0, NAN, 3])


def test_the_mean_of_an_optional_scorer_replaces_missing_scores():
    combination = Combination({"a": 1.0, "b": 1.0}, optional=frozenset({"b"}))
    a = np.float32([1, 2, 3, NAN])
    # 90 has no reward, so it is not in the mean
    assert near(combination({"a": a, "b": np.float32([10, NAN, 20, 90])}), [11, 17, 23, NAN])
    # excluded from the whole group
    assert near(combination({"a": a, "b": np.full(4, NAN, np.float32)}), a)
    alone = combination.for_evaluation
    assert alone.weights == {"a": 1.0} and near(alone({"a": a, "b": a}), a)


def test_the_combination_is_read_from_the_configuration():
    rewards = Rewards(
        scorers=(
            ScorerConfig(name="jpeg_compressibility", alias="small", weight=2.0, floor=-1.0),
            ScorerConfig(name="jpeg_compressibility", required=False),
        ),
        evaluation_scorers=(ScorerConfig(name="jpeg_incompressibility"),),
        normalize="rank",
    )
    combination = Combination.from_config(rewards)
    assert combination.weights == {"small": 2.0, "jpeg_compressibility": 1.0}
    assert combination.floors == {"small": -1.0}
    assert combination.optional == {"jpeg_compressibility"} and combination.normalize == "rank"
    assert combination.for_evaluation == Combination({"small": 2.0}, {"small": -1.0})
    labels = ("jpeg_compressibility", "jpeg_incompressibility")
    assert list(WeightedScorer.from_config(rewards).scorers) == ["small", "jpeg_compressibility"]
    assert list(WeightedScorer.from_config(rewards, labels).scorers) == list(labels)


@pytest.mark.parametrize(
    ("scorers", "message"),
    [
        (
            [{"name": "shapes"}, {"name": "shapes"}],
            "two scorers would be logged under one name.*give one of them an alias",
        ),
        ([{"name": "shapes", "required": False}], "all are optional"),
    ],
)
def test_impossible_combinations_are_refused(scorers, message):
    with pytest.raises(ValueError, match=message):
        Rewards.model_validate({"scorers": scorers})


class Counting:
    """Scorer by the mean of an image, which counts its images."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.fails = False

    def __call__(self, images, prompts, metadata):
        self.calls.append(len(images))
        if self.fails:
            raise RuntimeError("broken")
        self.parts = {"first": images[:, 0, 0, 0].astype(np.float32)}
        return images.reshape(len(images), -1).mean(1) + np.array(
            [len(prompt) for prompt in prompts]
        )


def test_cached_images_are_not_scored_again():
    images = np.random.default_rng(0).integers(0, 256, (4, 3, 5, 5), dtype=np.uint8)
    images[3] = images[0]
    inner = Counting()
    cache = ScoreCache(WeightedScorer({"own": inner}, {"own": 1.0}))
    prompts, metadata = ["a", "b", "c", "a"], [{}, {}, {}, {}]
    first = cache.attempt(images, prompts, metadata)
    plain = WeightedScorer({"own": Counting()}, {"own": 1.0}).attempt(images, prompts, metadata)
    # equal images were scored once
    assert np.array_equal(first.scores["own"], plain.scores["own"]) and inner.calls == [3]
    assert np.array_equal(first.parts["own/first"], plain.parts["own/first"])
    again = cache.attempt(images[::-1], prompts[::-1], metadata)
    assert np.array_equal(again.scores["own"], first.scores["own"][::-1]) and inner.calls == [3]
    assert np.array_equal(again.parts["own/first"], first.parts["own/first"][::-1])
    for change in (
        (images + np.uint8(1), prompts, metadata),  # another image
        (images, ["x"] * 4, metadata),  # another prompt
        (images, prompts, [{"n": 1}] * 4),  # other metadata
        (images.reshape(4, 3, 1, 25), prompts, metadata),  # the same bytes in another shape
    ):
        cache.attempt(*change)
    assert inner.calls == [3, 3, 3, 3, 3] or inner.calls == [3, 3, 2, 3, 3]


def test_failures_are_not_cached_and_old_entries_are_dropped():
    images = np.arange(3, dtype=np.uint8)[:, None, None, None].repeat(3, 1)
    inner = Counting()
    cache = ScoreCache(WeightedScorer({"own": inner}, {"own": 1.0}), size=2)
    inner.fails = True
    failed = cache.attempt(images, [""] * 3, [{}] * 3)
    assert np.isnan(failed.scores["own"]).all() and "broken" in failed.failures[0]
    inner.fails = False
    whole = cache.attempt(images, [""] * 3, [{}] * 3)
    assert whole.scores["own"].tolist() == [0, 1, 2]
    assert not whole.failures
    assert inner.calls == [3, 3]
    cache.attempt(images, [""] * 3, [{}] * 3)
    assert inner.calls == [3, 3, 1]  # two were kept, and the oldest was dropped


def test_scorers_with_the_same_uncached_images_share_a_batch():
    """The batch allows one shared resize; a scorer with more cached scores gets only its own
    rest.
    """
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 5, 5), dtype=np.uint8)
    resized: list[int] = []

    class Resizing(Counting):
        def __call__(self, images, prompts, metadata):
            small = cached_per_batch(
                images, ("small",), lambda: resized.append(len(images)) or images[:, :, :2, :2]
            )
            return super().__call__(small, prompts, metadata)

    a, b = Resizing(), Resizing()
    cache = ScoreCache(WeightedScorer({"a": a, "b": b}, {"a": 1.0, "b": 1.0}))
    cache.attempt(images[:1], [""], [{}], ["a"])
    made = cache.attempt(images[1:], [""] * 2, [{}] * 2)
    assert resized == [1, 2] and np.array_equal(made.scores["a"], made.scores["b"])
    assert list(made.scores) == ["a", "b"]
    assert list(made.parts) == ["a/first", "b/first"]
    assert [made.work[label][0] for label in "ab"] == [2, 2]
    made = cache.attempt(images, [""] * 3, [{}] * 3)  # a has all in its cache, b lacks the first
    assert list(made.work) == ["b"] and made.work["b"][0] == 1  # cached scores count as no work
    assert (a.calls, b.calls) == ([1, 2], [2, 1])
    assert np.array_equal(made.scores["a"], made.scores["b"])
