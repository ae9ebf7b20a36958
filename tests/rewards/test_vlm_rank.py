"""The comparing judge: the images it is shown, the reading of its rankings, and that no ranking is
no score.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import rewards.server
from configs.rewards import Rewards
from configs.rewards import Scorer as ScorerConfig
from rewards import ScorerError, ScorerSetupError, ScorerUnreachable, build, check_settings
from rewards.endpoint import EDITED
from rewards.vlm_rank import VlmRankScorer
from tests.rewards.judge import Judge, judging, pixels

COUNT = 9
IMAGES = np.zeros((COUNT, 3, 6, 6), np.uint8)
IMAGES[:, 0] = np.arange(10, 10 + 20 * COUNT, 20, dtype=np.uint8)[:, None, None]
PROMPTS, METADATA = ["a {prompt}"] * COUNT, [{}] * COUNT


@pytest.fixture
def judge(monkeypatch) -> Iterator[Judge]:
    monkeypatch.setattr(rewards.server, "FIRST_BACKOFF_S", 0.001)
    with judging() as one:
        yield one


def scorer(judge: Judge, **more: object) -> VlmRankScorer:
    settings = {"url": judge.url, "model": "judge-7b", **more}
    made = build(ScorerConfig(name="vlm_rank", settings=settings))
    assert isinstance(made, VlmRankScorer)
    return made


def test_one_list_of_all_images_gives_the_full_order(judge):
    """There is one request, and its images are not in the order in which they were given."""
    found = scorer(judge, size=COUNT, rounds=1)(IMAGES, PROMPTS, METADATA)
    assert found.dtype == np.float32 and np.argsort(found).tolist() == list(range(COUNT))
    assert found.mean() == pytest.approx(0.5, abs=1e-6)  # by symmetry
    (recorded,) = judge.requests
    content = recorded["messages"][0]["content"]
    assert [part["text"] for part in content[:-1:2]] == [f"Image {n}:" for n in range(1, COUNT + 1)]
    assert "Prompt: a {prompt}" in content[-1]["text"]
    schema = recorded["response_format"]["json_schema"]["schema"]["properties"]["ranking"]
    assert (schema["minItems"], schema["items"]["maximum"]) == (COUNT, COUNT)


def test_the_source_image_precedes_the_list(judge):
    source = np.full((3, 6, 6), 77, np.uint8)
    found = scorer(judge, size=COUNT, rounds=1)(IMAGES, PROMPTS, [{"image": source}] * COUNT)
    assert np.argsort(found).tolist() == list(range(COUNT))
    content = judge.requests[0]["messages"][0]["content"]
    assert (content[0]["text"], content[2]["text"], content[3]["text"]) == (*EDITED, "Image 1:")
    assert pixels(content[1]).mean() == 77


def test_short_lists_cover_all_images_over_rounds(judge):
    made = scorer(judge, size=3, rounds=4)
    found = made(IMAGES, PROMPTS, METADATA)
    assert len(judge.requests) == 3 * 4
    assert found[-1] > 0.9 and found[0] < 0.1
    assert np.corrcoef(found, np.arange(COUNT))[0, 1] > 0.9
    assert made.parts["consistency"].min() > 0.5
    np.testing.assert_allclose(made.parts["tokens"], 12 * 302 / COUNT)


def test_pairs_by_log_probabilities(judge):
    """The stand-in prefers either of two images with probabilities in proportion to redness, 10 and
    30.
    """
    made = scorer(judge, size=2, rounds=1, read="logprobs")
    low, high = made(IMAGES[:2], PROMPTS[:2], METADATA[:2])
    assert low + high == pytest.approx(1) and low < 0.5
    assert judge.requests[0]["max_tokens"] == 1
    # the most likely strengths x and 1 / x of 0.75 wins and 0.25, with half a win and half a loss
    x = float(high / (1 - high))
    gradient = 0.75 - x * x / (1 + x * x) + 0.5 * (1 - x) / (1 + x)
    assert gradient == pytest.approx(0, abs=1e-6)


def test_neither_the_order_of_the_images_nor_a_retry_changes_a_score(judge):
    first = scorer(judge)(IMAGES, PROMPTS, METADATA)
    made, backwards = scorer(judge), slice(None, None, -1)
    judge.answers = ["prose"] * 2
    lame = made(IMAGES[backwards], PROMPTS, METADATA)
    requested = len(judge.requests)
    np.testing.assert_array_equal(made(IMAGES[backwards], PROMPTS, METADATA), first[backwards])
    assert len(judge.requests) == requested + 2  # only the rankings without a verdict
    assert not np.array_equal(lame, first[backwards])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "The second is best.",
            ("the judge's answer is not the expected JSON: 'The second is best.'"),
        ),
        ('{"ranking": [1, 2, 2]}', r"ranking of 3 images is \[1, 2, 2\]"),
        ('{"ranking": [1, 2]}', r"ranking of 3 images is \[1, 2\]"),
        ('{"ranking": [0, 1, 2]}', r"ranking of 3 images is \[0, 1, 2\]"),
        ('{"ranking": [1.0, 2, 3]}', r"ranking of 3 images is \[1.0, 2, 3\]"),
        ('{"ranking": [true, 2, 3]}', r"ranking of 3 images is \[True, 2, 3\]"),
        ('{"ranking": 1}', "ranking of 3 images is 1"),
    ],
)
def test_an_invalid_ranking_is_a_failure(judge, text, message):
    judge.answers = [text]
    with pytest.raises(ScorerError, match=message):
        scorer(judge, size=3, rounds=1)(IMAGES[:3], PROMPTS[:3], METADATA[:3])


def test_a_judge_is_unreachable_if_no_request_finds_it(judge):
    made = scorer(judge, size=3, rounds=1, retries=0, in_flight=1)
    judge.answers = [503] * 3
    with pytest.raises(ScorerUnreachable, match="answered 503 Service Unavailable, tries: 1"):
        made(IMAGES, PROMPTS, METADATA)
    judge.answers = [503, 200, 200]
    assert np.isnan(made(IMAGES, PROMPTS, METADATA)).sum() == 3
    judge.answers = [503]
    with pytest.raises(ScorerUnreachable):
        made(IMAGES, PROMPTS, METADATA)


def test_an_image_without_a_verdict_has_no_score(judge):
    judge.answers = ["prose"]
    found = scorer(judge, size=3, rounds=1, in_flight=1)(IMAGES, PROMPTS, METADATA)
    assert np.isnan(found).sum() == 3 and np.isfinite(found).sum() == 6


def test_images_of_several_prompts_are_not_compared(judge):
    with pytest.raises(ScorerError, match="9 images of 2 prompts"):
        scorer(judge)(IMAGES, ["b", *PROMPTS[1:]], METADATA)
    with pytest.raises(ScorerError, match="1 images of 1 prompts"):
        scorer(judge)(IMAGES[:1], PROMPTS[:1], METADATA[:1])
    assert judge.requests == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 1}, "size is 1: use a whole number, 2 or more"),
        ({"rounds": 0}, "rounds is 0"),
        ({"read": "logprobs"}, "use size = 2, or read = 'json'"),
        ({"rubric": "which?"}, "rubric has no {prompt}"),
        ({"url": "http://judge.example/v1"}, "unencrypted"),
        ({"in_flight": 0}, "in_flight is 0"),
    ],
)
def test_settings_are_checked(settings, message):
    given = {"url": "http://localhost:1/v1", "model": "m", **settings}
    with pytest.raises(ScorerSetupError, match=message):
        check_settings(ScorerConfig(name="vlm_rank", per="prompt", settings=given))


def test_comparing_scorers_need_all_images_of_a_prompt():
    settings = {"url": "http://localhost:1/v1", "model": "m"}
    with pytest.raises(ScorerSetupError, match="it compares images of a prompt: set per = 'prompt"):
        check_settings(ScorerConfig(name="vlm_rank", settings=settings))
    with pytest.raises(ScorerSetupError, match="it does not compare .*: set per = 'image'"):
        check_settings(ScorerConfig(name="vlm", per="prompt", settings=settings))
    for per in ("image", "prompt"):  # a custom server may do either
        check_settings(ScorerConfig(name="http", per=per, settings={"url": settings["url"]}))


def test_held_out_images_need_a_non_comparing_scorer():
    ranks, plain = {"name": "vlm_rank", "per": "prompt"}, {"name": "jpeg_compressibility"}
    for others in ([], [plain | {"weight": 0.0}], [plain | {"required": False}]):
        with pytest.raises(ValueError, match="held-out images have no reward"):
            Rewards.model_validate({"scorers": [ranks, *others]})
    with pytest.raises(ValueError, match="does not measure the weights that generated them"):
        Rewards.model_validate({"scorers": [plain], "evaluation_scorers": [ranks]})
    assert Rewards.model_validate({"scorers": [ranks, plain]}).comparing_labels == ["vlm_rank"]
