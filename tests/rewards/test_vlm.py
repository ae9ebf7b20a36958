"""The judge: its questions, the reading of its answers, and that words are no rating."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import rewards.server
from configs.rewards import Scorer as ScorerConfig
from rewards import (
    ScorerError,
    ScorerSetupError,
    ScorerUnreachable,
    build,
    check_settings,
    endpoint,
)
from rewards.endpoint import EDITED
from rewards.vlm import VlmScorer
from tests.rewards.judge import Judge, judging, pixels

REDS = (0, 51, 204, 255)
IMAGES = np.zeros((4, 3, 6, 9), np.uint8)
IMAGES[:, 0] = np.array(REDS, np.uint8)[:, None, None]
PROMPTS, METADATA = ["a", "b {low}", "c \u4e00", "d"], [{}] * 4
AFTER = {"logprobs": [], "json": [], "text": ["Score:"]}
WANTED = np.array(REDS, np.float32) / 255
"""Scores in [0, 1] of ratings 1 to 5 with a mean of 1 + 4 x redness."""


@pytest.fixture
def judge(monkeypatch) -> Iterator[Judge]:
    monkeypatch.setattr(rewards.server, "FIRST_BACKOFF_S", 0.001)
    with judging() as one:
        yield one


def scorer(judge: Judge, **more: object) -> VlmScorer:
    settings = {"url": judge.url, "model": "judge-7b", **more}
    made = build(ScorerConfig(name="vlm", settings=settings))
    assert isinstance(made, VlmScorer)
    return made


@pytest.mark.parametrize("read", ["logprobs", "json", "text"])
def test_a_rating_is_read(judge, read):
    """It is the mean over tokens that are ratings, with and without a space; "The" does not
    count.
    """
    found = scorer(judge, read=read, after=AFTER[read])(IMAGES, PROMPTS, METADATA)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, WANTED, atol=1e-6)


def test_the_judge_gets_the_rubric_and_the_image(judge):
    scorer(judge, rubric="From {low} to {high}: {prompt}", in_flight=1)(IMAGES, PROMPTS, METADATA)
    texts = [recorded["messages"][0]["content"][1]["text"] for recorded in judge.requests]
    assert texts[1] == "From 1 to 5: b {low}\n\nAnswer with the number alone."
    first = judge.requests[0]
    assert (first["model"], first["max_tokens"], first["top_logprobs"]) == ("judge-7b", 1, 20)
    judge.requests.clear()
    scorer(judge, read="json", low=0, high=10)(IMAGES[:1], PROMPTS[:1], METADATA[:1])
    schema = judge.requests[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["score"] == {"type": "number", "minimum": 0, "maximum": 10}


def test_the_judge_sees_the_image_to_edit_first(judge):
    """The judge rates the other image; the same image with another source is rated again."""
    ask = scorer(judge, in_flight=1)
    for value in (10, 20, 20):
        source = np.full((3, 6, 9), value, np.uint8)
        found = ask(IMAGES[2:3], ["redder"], [{"image": source}])
        np.testing.assert_allclose(found, WANTED[2:3], atol=1e-6)
    assert len(judge.requests) == 2
    message, before, then, shown, _ = judge.requests[0]["messages"][0]["content"]
    assert (message["text"], then["text"]) == EDITED
    assert pixels(before).mean() == 10 and np.array_equal(pixels(shown)[..., 0], IMAGES[2, 0])


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        ("logprobs", "I", "the judge answers 'I' instead of a number: 10% on 1 to 5"),
        ("logprobs", "7", "answers '7' instead of a number"),
        (
            "json",
            "A lovely image, 5 of 5!",
            ("the judge's answer is not the expected JSON: 'A lovely image"),
        ),
        ("json", '{"score": "5"}', "is '5', which is not a number"),
        ("json", '{"score": true}', "is True, which is not a number"),
        ("json", '{"score": 6}', "is 6, outside 1 to 5"),
        ("json", '{"score": NaN}', "is nan, outside 1 to 5"),
        ("json", "5", "not the expected JSON"),
        ("text", "Lovely!", "answer has no number from 1 to 5 after Score:: 'Lovely!'"),
        ("text", "Score: 6", "answer has no number from 1 to 5"),
    ],
)
def test_an_answer_in_words_is_a_failure_and_never_zero(judge, read, text, message):
    judge.answers = [text] * 4
    with pytest.raises(ScorerError, match=message) as caught:
        scorer(judge, read=read, after=AFTER[read])(IMAGES, PROMPTS, METADATA)
    assert "\n" not in str(caught.value)
    judge.answers = [text]
    found = scorer(judge, read=read, after=AFTER[read], in_flight=1)(IMAGES, PROMPTS, METADATA)
    assert np.isnan(found[0]) and np.allclose(found[1:], WANTED[1:], atol=1e-6)


def test_the_numbers_of_a_text_are_averaged(judge):
    """Nothing is added to the rubric, and a number that was cut off does not count."""
    judge.answers = ["Fit (1-5): 2.5\nStyle (1-5): 4", ("Fit (1-5): 2\nStyle (1-5): 4", "length")]
    made = scorer(judge, read="text", after=["Fit (1-5):", "Style (1-5):"], in_flight=1, cache=0)
    found = made(IMAGES[:2], PROMPTS[:2], METADATA[:2])
    assert found[0] == np.float32((3.25 - 1) / 4) and np.isnan(found[1])
    recorded = judge.requests[0]
    assert recorded["max_tokens"] == 512 and "response_format" not in recorded
    assert recorded["messages"][0]["content"][1]["text"].endswith("\n\nPrompt: a")


def test_votes_are_averaged(judge):
    """Ratings of seeds 0, 1, 2 are 0, 1/8 and 2/8 higher, within the range."""
    made = scorer(judge, read="json", votes=3, temperature=1.0)
    found = made(IMAGES[:2], PROMPTS[:2], METADATA[:2])
    np.testing.assert_allclose(found, WANTED[:2] + 0.125, atol=1e-6)
    np.testing.assert_allclose(made.parts["spread"], np.std([0, 0.125, 0.25]), atol=1e-6)
    assert sorted(recorded["seed"] for recorded in judge.requests) == [0, 0, 1, 1, 2, 2]


def test_most_votes_must_contain_a_rating(judge):
    """If one of three answers in words, the rating is the mean of the others; if two do, there is
    none.
    """
    judge.answers = ["prose"]
    made = scorer(judge, read="json", votes=3, temperature=1.0, in_flight=1)
    found = made(IMAGES[:1], PROMPTS[:1], METADATA[:1])
    np.testing.assert_allclose(found, WANTED[:1] + (0.125 + 0.25) / 2, atol=1e-6)
    judge.answers = ["prose", "prose"]
    with pytest.raises(ScorerError, match=r"prose.*\(2 of 3 votes\)"):
        made(IMAGES[1:2], PROMPTS[1:2], METADATA[1:2])


@pytest.mark.parametrize("trouble", [429, 503, (429, {"Retry-After": "0"})])
def test_temporary_failures_are_retried(judge, trouble):
    judge.answers = [trouble] * 3
    found = scorer(judge)(IMAGES, PROMPTS, METADATA)
    np.testing.assert_allclose(found, WANTED, atol=1e-6)
    assert len(judge.requests) == 4 + 3


def test_retry_after_is_waited_for(judge, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(rewards.server.time, "sleep", slept.append)
    judge.answers = [(429, {"Retry-After": "7"}), (429, {"Retry-After": "999"}), 503]
    scorer(judge, in_flight=1)(IMAGES[:1], PROMPTS[:1], METADATA[:1])
    # the server's delay, at most timeout_s; otherwise the scorer's own
    assert slept == [7.0, 60.0, pytest.approx(0.004)]


def test_an_image_without_an_answer_keeps_the_others(judge):
    judge.answers = [400]
    made = scorer(judge, in_flight=1)
    found = made(IMAGES, PROMPTS, METADATA)
    assert np.isnan(found[0]) and np.allclose(found[1:], WANTED[1:], atol=1e-6)
    judge.requests.clear()
    np.testing.assert_allclose(made(IMAGES, PROMPTS, METADATA), WANTED, atol=1e-6)
    assert len(judge.requests) == 1  # the others are cached
    judge.answers = [401] * 4
    with pytest.raises(ScorerError, match="answered 401 Unauthorized, tries: 1"):
        scorer(judge)(IMAGES, PROMPTS, METADATA)


def test_a_judge_is_unreachable_if_no_request_finds_it(judge):
    """Ratings that are known are not lost, and the answer to one request counts."""
    made = scorer(judge, in_flight=1, retries=0)
    judge.answers = [503] * 4
    with pytest.raises(ScorerUnreachable, match="answered 503 Service Unavailable, tries: 1"):
        made(IMAGES, PROMPTS, METADATA)
    judge.answers = [503, 200, 200, 400]
    found = made(IMAGES, PROMPTS, METADATA)
    assert np.isnan(found[[0, 3]]).all() and np.allclose(found[1:3], WANTED[1:3], atol=1e-6)
    judge.answers = [503, 503]
    with pytest.raises(ScorerUnreachable):
        made(IMAGES, PROMPTS, METADATA)
    np.testing.assert_allclose(made(IMAGES, PROMPTS, METADATA), WANTED, atol=1e-6)


@pytest.mark.parametrize("read", ["json", "text"])
def test_the_length_of_an_answer_is_limited(judge, read):
    """A model that does not end would otherwise write until its context is full."""
    judge.answers = [('{"score": 3.00000000', "length")] * 4
    made = scorer(judge, read=read, after=AFTER[read], max_tokens=9)
    message = {"json": 'cut off: raise max_tokens: \'{"score": 3.0', "text": "no number from 1"}
    with pytest.raises(ScorerError, match=message[read]):
        made(IMAGES, PROMPTS, METADATA)
    assert {recorded["max_tokens"] for recorded in judge.requests} == {9}


def test_requests_in_flight_are_limited(judge):
    """Three requests meet at a barrier that opens for three; a fourth never arrives."""
    judge.meet = threading.Barrier(3)
    images, prompts = np.repeat(IMAGES, 3, axis=0), [f"{n}" for n in range(12)]
    scorer(judge, in_flight=3)(images, prompts, [{}] * 12)
    assert len(judge.requests) == 12 and judge.most == 3


def test_cached_ratings_are_not_requested_again(judge):
    made = scorer(judge, price_in=2.0, price_out=10.0)
    twice = np.concatenate([IMAGES, IMAGES[:1]])
    found = made(twice, [*PROMPTS, PROMPTS[0]], [{}] * 5)
    assert len(judge.requests) == 4 and found[4] == found[0]
    np.testing.assert_allclose(made.parts["tokens"], [302] * 4 + [0])
    np.testing.assert_allclose(made.parts["cost"], [(600 + 20) / 1e6] * 4 + [0], rtol=1e-6)
    made(IMAGES, PROMPTS, METADATA)
    assert len(judge.requests) == 4 and not made.parts["cost"].any()
    made(IMAGES[:1], ["another prompt"], [{}])
    assert len(judge.requests) == 5
    small = scorer(judge, cache=1)
    small(IMAGES, PROMPTS, METADATA)
    small(IMAGES, PROMPTS, METADATA)
    assert len(judge.requests) == 5 + 4 + 3


def test_the_key_comes_from_the_environment(judge, monkeypatch):
    monkeypatch.setenv("JUDGES_KEY", "s3cret")
    scorer(judge, key_env="JUDGES_KEY")(IMAGES[:1], PROMPTS[:1], METADATA[:1])
    assert judge.keys == ["Bearer s3cret"]
    monkeypatch.delenv("JUDGES_KEY")
    with pytest.raises(ScorerSetupError, match="key_env is 'JUDGES_KEY': this variable is not set"):
        scorer(judge, key_env="JUDGES_KEY")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "localhost:80"}, "give http://"),
        ({"url": "http://judge:8000/v1"}, "unencrypted: use https://, or set plain_http = true"),
        ({"plain_http": 1}, "plain_http is 1: use true or false"),
        ({"read": "words"}, "use one of logprobs, json, text"),
        ({"read": "text"}, r"after is \(\): read = 'text' needs a list of the words"),
        ({"read": "text", "after": "Score:"}, "after is 'Score:'"),
        ({"read": "text", "after": [""]}, r"after is \[''\]"),
        ({"read": "json", "after": ["Score:"]}, "other values of read do not use it"),
        ({"high": 10}, r"use at most 9, or read = 'json'"),
        ({"low": 5}, "low must be lower than high"),
        ({"votes": 3}, "votes is 3 at temperature 0"),
        ({"rubric": "How good?"}, "rubric has no {prompt}"),
        ({"in_flight": 0}, "in_flight is 0"),
        ({"modle": "x"}, "modle"),
    ],
)
def test_settings_are_checked(settings, message):
    given = {"url": "https://x/v1", "model": "m", **settings}
    with pytest.raises(ScorerSetupError, match=message):
        check_settings(ScorerConfig(name="vlm", settings=given))


def test_plain_http_to_another_machine_needs_permission():
    given = {"url": "http://judge:8000/v1", "model": "m", "plain_http": True}
    check_settings(ScorerConfig(name="vlm", settings=given))


@pytest.mark.parametrize("code", [302, 307])
def test_no_redirect_is_followed(judge, code):
    """The other endpoint gets neither image nor key."""
    with judging() as other:
        judge.answers = [(code, {"Location": other.url})]
        with pytest.raises(ScorerError, match=f"answered {code} .*redirects are not followed"):
            scorer(judge)(IMAGES[:1], PROMPTS[:1], METADATA[:1])
        assert other.requests == [] and len(judge.requests) == 1


def test_too_long_ratings_are_refused(judge):
    judge.answers = ["x" * 2**20]
    with pytest.raises(ScorerError, match="answered more than 1048576 bytes"):
        scorer(judge, read="json")(IMAGES[:1], PROMPTS[:1], METADATA[:1])


def test_a_slow_answer_times_out(judge):
    """Every byte arrives in time, but the whole answer would take seconds."""
    judge.drips = True
    with pytest.raises(ScorerError, match="timed out after 0.3 s"):
        scorer(judge, timeout_s=0.3, retries=0)(IMAGES[:1], PROMPTS[:1], METADATA[:1])


def test_plain_http_uses_no_proxy(judge, monkeypatch):
    with judging() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        rewards.server._opener.cache_clear()  # it may have looked already
        scorer(judge)(IMAGES, PROMPTS, METADATA)
        assert proxy.requests == [] and len(judge.requests) == 4


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"choices": []}',
        b'{"choices": [1], "usage": [300]}',
        b'{"choices": [1], "usage": {"prompt_tokens": "many"}}',
        b'{"choices": [1], "usage": {"prompt_tokens": Infinity}}',
    ],
)
def test_a_malformed_answer_has_no_verdict(monkeypatch, body):
    monkeypatch.setattr(endpoint, "post", lambda *_: body)
    judge = VlmScorer("http://localhost:1/v1", "m")
    with pytest.raises(endpoint.NoVerdict, match="is not a chat completion"):
        judge.ask([], 0, {})
