"""The http scorer with a server in this process: its requests, accepted answers, and all
failures.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from email.message import Message
from urllib.error import HTTPError

import numpy as np
import pytest

import rewards.server
from configs.rewards import Scorer as ScorerConfig
from rewards import ScorerError, ScorerSetupError, ScorerUnreachable, build
from rewards.server import HttpScorer, decode, why_unreachable
from tests.rewards.server import Handler, Server, serving

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 3, 6, 9), dtype=np.uint8)
PROMPTS, METADATA = ["a", "b \u4e00", ""], [{"n": 1}, {}, {"n": [2]}]


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setattr(rewards.server, "FIRST_BACKOFF_S", 0.01)
    with serving() as one:
        yield one


@pytest.mark.parametrize("encoding", ["npz", "json"])
def test_the_server_gets_exact_images_and_prompts(server, encoding):
    scorer = build(ScorerConfig(name="http", settings={"url": server.url, "encoding": encoding}))
    scores = scorer(IMAGES, PROMPTS, METADATA)
    assert scores.dtype == np.float32 and np.allclose(scores, IMAGES.mean((1, 2, 3)))
    (recorded,) = server.requests
    assert np.array_equal(np.stack(recorded["images"]), IMAGES)
    assert recorded["prompts"] == PROMPTS
    assert recorded["metadata"] == METADATA


@pytest.mark.parametrize("encoding", ["npz", "json"])
def test_the_server_gets_each_image_to_edit_once(server, encoding):
    """With two prompts and three images, the metadata says which source belongs to which image."""
    one, other = IMAGES[0] // 2, IMAGES[1] // 3
    metadata = [{"n": 1, "image": other}, {"image": one}, {"image": other}]
    HttpScorer(server.url, encoding)(IMAGES, PROMPTS, metadata)
    (recorded,) = server.requests
    assert recorded["metadata"] == [{"n": 1, "image": 0}, {"image": 1}, {"image": 0}]
    assert np.array_equal(np.stack(recorded["sources"]), np.stack([other, one]))
    assert metadata[1]["image"] is one


def test_batches_keep_their_order(server):
    scores = HttpScorer(server.url, batch_size=2)(IMAGES, PROMPTS, METADATA)
    assert np.allclose(scores, IMAGES.mean((1, 2, 3)))
    assert [len(recorded["prompts"]) for recorded in server.requests] == [2, 1]
    assert HttpScorer(server.url)(IMAGES[:0], [], []).shape == (0,) and len(server.requests) == 2


def test_no_retry_starts_after_the_time_of_all_attempts(monkeypatch):
    """Each attempt takes 50 s, and the server requests pauses of 60 s: starts at 0, 110, 220, 330.

    Six attempts of 60 s each may take 360 s, so a fifth one would start too late, at 440 s.
    """
    seconds, starts = [0.0], []

    def wait(pause: float) -> None:
        seconds[0] += pause

    def unavailable(*_: object) -> bytes:
        starts.append(seconds[0])
        wait(50.0)
        headers = Message()
        headers["Retry-After"] = "60"
        raise HTTPError("http://localhost/", 503, "busy", headers, None)

    monkeypatch.setattr(rewards.server, "_read", unavailable)
    monkeypatch.setattr(rewards.server.time, "monotonic", lambda: seconds[0])
    monkeypatch.setattr(rewards.server.time, "sleep", wait)
    with pytest.raises(ScorerError, match="answered 503 busy, tries: 4"):
        rewards.server.post("http://localhost/", b"", {}, timeout_s=60.0, retries=5, most=1)
    assert starts == [0.0, 110.0, 220.0, 330.0]


@pytest.mark.parametrize("trouble", [500, 503, 429, "slow", "hang up"])
def test_temporary_failures_are_retried(server, trouble):
    server.answers = [trouble]
    scores = HttpScorer(server.url, timeout_s=0.3, retries=1)(IMAGES, PROMPTS, METADATA)
    assert np.allclose(scores, IMAGES.mean((1, 2, 3))) and len(server.requests) == 2


@pytest.mark.parametrize(
    ("answers", "text_of_error"),
    [
        ([500] * 3, "answered 500 Internal Server Error, tries: 3"),
        (["slow"] * 3, r"did not answer \(.*timed out.*\), tries: 3"),
        ([404], "answered 404 Not Found, tries: 1"),
        ([b"<html>"], "not a JSON object with 'scores'"),
        ([b'{"scores": [1, 2]}'], "2 scores for 3 images"),
        ([b'{"scores": [1, 2, "x"]}'], "3 numbers or nulls"),
    ],
)
def test_permanent_failures_are_errors_and_never_zero(server, answers, text_of_error):
    server.answers = list(answers)
    with pytest.raises(ScorerError, match=text_of_error) as caught:
        HttpScorer(server.url, timeout_s=0.2)(IMAGES, PROMPTS, METADATA)
    assert "\n" not in str(caught.value)


def test_a_missing_server_is_an_error():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ScorerUnreachable, match="did not answer .*refused.*, tries: 1"):
        HttpScorer(f"http://127.0.0.1:{port}/", retries=0)(IMAGES, PROMPTS, METADATA)


@pytest.mark.parametrize(
    ("answers", "unreachable"),
    [
        *(([status, status], True) for status in (429, 502, 503, 504)),
        *(([status, status], False) for status in (408, 500, "slow", "hang up")),
        ([404], False),
        ([500, 503], True),
        ([503, 500], False),  # the last answer counts
    ],
)
def test_a_server_that_takes_no_requests_now_is_unreachable(server, answers, unreachable):
    """A request that was sent may itself be the cause of a failure: it is not waited for."""
    server.answers = list(answers)
    with pytest.raises(ScorerError) as caught:
        HttpScorer(server.url, timeout_s=0.2, retries=1)(IMAGES, PROMPTS, METADATA)
    assert isinstance(caught.value, ScorerUnreachable) == unreachable


@pytest.mark.parametrize(
    ("status", "why"),
    [
        *((status, "") for status in (200, 301, 404, 405, 500)),
        *((status, f"answered {status} ") for status in (429, 502, 503, 504)),
    ],
)
def test_whether_a_server_takes_requests_can_be_asked(server, monkeypatch, status, why):
    def do_head(self: Handler) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    monkeypatch.setattr(Handler, "do_HEAD", do_head, raising=False)
    assert why_unreachable(server.url, 5.0).startswith(why)
    assert bool(why_unreachable(server.url, 5.0)) == bool(why)
    assert server.requests == []


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:{port}/", r"did not answer \(.*refused\)$"),
        ("http://[::1/", r"did not answer \(.*IPv6.*\)$"),
        ("http://127.0.0.1:port/", r"did not answer \(nonnumeric port: 'port'\)$"),
    ],
)
def test_why_a_server_is_not_reached(url, why):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert re.match(why, why_unreachable(url.format(port=port), 5.0))


def test_null_is_a_missing_score():
    assert np.array_equal(
        decode(b'{"scores": [1, null, 2.5]}', 3), np.float32([1, np.nan, 2.5]), equal_nan=True
    )


@pytest.mark.parametrize(
    ("settings", "text_of_error"),
    [
        ({"url": "localhost:80"}, "give http://"),
        ({"url": "file:///etc/passwd"}, "give http://"),
        ({"url": "https://x", "encoding": "pickle"}, "use one of npz, json"),
        ({"url": "https://x", "timeout_s": 0}, "use a positive time"),
        ({"url": "http://reward:8000/score"}, "unencrypted: use https://"),
        ({"url": "http://10.0.0.7/score"}, "set plain_http = true"),
        ({"url": "http://127.0.0.1.evil.example/"}, "unencrypted"),
        ({"url": "https://x", "plain_http": "yes"}, "plain_http is 'yes': use true or false"),
    ],
)
def test_settings_are_checked(settings, text_of_error):
    with pytest.raises(ScorerSetupError, match=text_of_error):
        build(ScorerConfig(name="http", settings=settings))


@pytest.mark.parametrize("url", ["http://localhost:1/", "http://127.3.2.1/", "http://[::1]:80/x"])
def test_plain_http_stays_on_this_machine(url):
    HttpScorer(url)
    HttpScorer(url.replace("localhost", "elsewhere"), plain_http=True)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(server, code):
    """The other server gets neither images nor requests."""
    with serving() as other:
        server.answers, server.location = [code], other.url
        with pytest.raises(ScorerError, match=f"answered {code} .*redirects are not followed"):
            HttpScorer(server.url)(IMAGES, PROMPTS, METADATA)
        assert other.requests == [] and other.seen == 0 and len(server.requests) == 1


def test_too_long_answers_are_refused(server):
    server.answers = ["endless"]
    with pytest.raises(ScorerError, match="answered more than 65728 bytes, which is too long"):
        HttpScorer(server.url)(IMAGES, PROMPTS, METADATA)
    assert server.sent < 32 * 2**20  # data in buffers along the way


def test_a_slow_answer_times_out(server):
    """Every piece arrives in time, but the whole answer never would."""
    server.answers = ["drip"]
    with pytest.raises(ScorerError, match="timed out after 0.3 s"):
        HttpScorer(server.url, timeout_s=0.3, retries=0)(IMAGES, PROMPTS, METADATA)


def test_plain_http_uses_no_proxy(server, monkeypatch):
    with serving() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        rewards.server._opener.cache_clear()  # it may have looked already
        HttpScorer(server.url)(IMAGES, PROMPTS, METADATA)
        assert proxy.seen == 0 and len(server.requests) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 60000,
        b'{"scores": [1' + b"0" * 400 + b", 1, 2]}",
        b'{"scores": [1' + b"0" * 5000 + b", 1, 2]}",
        b'{"scores": [1e400, 1, 2]}',
        b'{"scores": {"a": 1, "b": 2, "c": 3}}',
        b'{"scores": "abc"}',
        b"\xff\xfe",
        b"",
    ],
)
def test_garbage_with_status_200_is_not_a_score(body):
    try:
        found = decode(body, 3)
    except ScorerError as error:
        assert "\n" not in str(error)
    else:
        assert not np.isfinite(found[0])  # the caller turns it into a missing score
