"""Scorer that queries a reward server over HTTP (docs/rewards.md); no answer can run code."""

from __future__ import annotations

import base64
import functools
import http.client
import io
import ipaddress
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from records.images import to_pil
from rewards.base import (
    BuiltIn,
    Metadata,
    ScorerError,
    ScorerSetupError,
    ScorerUnreachable,
    Settings,
    require_count,
    require_images,
    require_one_of,
    source_of,
)

TYPES = {"npz": "application/x-npz", "json": "application/json"}
RETRIED_STATUSES = (
    408,
    425,
    429,
)  # retried like 5xx: request timeout, too early, too many requests
UNREACHABLE_STATUSES = (429, 502, 503, 504)  # there may be a server later: it is waited for
FIRST_BACKOFF_S = 0.5  # before the first retry; doubles with every further one
ANSWER_BYTES = 65536, 64
"""Most bytes of an answer: a constant, and a number per image, whose score takes a few dozen."""
CHUNK_BYTES = 65536
LOCAL_HOSTS = ("localhost", "::1")


@dataclass(eq=False)
class HttpScorer(BuiltIn):
    """Scorer that posts images and prompts to ``url`` and reads the scores from the answer.

    ``encoding`` npz sends raw pixels, json sends PNG in base64. A timeout after ``timeout_s``, a
    broken connection and a status 5xx, 408, 425 or 429 are retried up to ``retries`` times; no
    retry starts later than (retries + 1) x timeout_s after the first attempt, so keep that well
    below the deadline of the reward service. ``batch_size`` 0 sends all images in one request. With
    ``clips``, in npz only, whole clips [B, F, 3, H, W] are sent instead of single frames.

    Images are sent to ``url`` only: no redirect is followed, and plain http to another machine
    needs ``plain_http``. An answer longer than scores can be is rejected.
    """

    compares: ClassVar[bool | None] = None

    url: str
    encoding: str = "npz"
    timeout_s: float = 60.0
    retries: int = 2
    batch_size: int = 0
    plain_http: bool = False
    clips: bool = False

    def __post_init__(self) -> None:
        self.check(vars(self))

    @staticmethod
    def check(settings: Settings) -> None:
        """Raise ScorerSetupError if settings are invalid."""
        require_url(settings["url"], settings["plain_http"])
        require_one_of("encoding", settings["encoding"], TYPES)
        if settings["clips"] and settings["encoding"] != "npz":
            raise ScorerSetupError("clips = true needs encoding = 'npz': json sends single images")
        require_seconds("timeout_s", settings["timeout_s"])
        require_count("retries", settings["retries"], 0)
        require_count("batch_size", settings["batch_size"], 0)

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        """Score uint8 [B, 3, H, W] as float32 [B], NaN for null.

        Raises ScorerError if the server does not answer or the answer is invalid.
        """
        require_images(images, prompts, metadata, self.clips)
        size = self.batch_size or max(1, len(images))
        parts = [
            self._ask(
                images[first : first + size],
                prompts[first : first + size],
                metadata[first : first + size],
            )
            for first in range(0, len(images), size)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def _ask(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        body = encode(self.encoding, images, prompts, metadata)
        headers = {"Content-Type": TYPES[self.encoding], "Accept": "application/json"}
        most = ANSWER_BYTES[0] + ANSWER_BYTES[1] * len(images)
        answer = post(self.url, body, headers, self.timeout_s, self.retries, most)
        return decode(answer, len(images))


def post(
    url: str, body: bytes, headers: Mapping[str, str], timeout_s: float, retries: int, most: int
) -> bytes:
    """Post ``body`` to ``url`` and return the answer: up to ``most`` bytes, within ``timeout_s``.

    Failures that may be temporary are retried with exponential backoff, or after the seconds in
    Retry-After, up to ``timeout_s``, if they are longer; but no later than ``(retries + 1) *
    timeout_s`` after the first attempt. No redirect is followed, and plain http uses no proxy.
    Raises ScorerError if no attempt succeeds, and its subclass ScorerUnreachable if the last one
    found no server that takes requests now.
    """
    request = urllib.request.Request(url, body, dict(headers))
    end = time.monotonic() + (retries + 1) * timeout_s
    problem, tries, pause, reached = "", 0, 0.0, True
    while tries <= retries:
        if tries:
            pause = max(pause, FIRST_BACKOFF_S * 2 ** (tries - 1))
            if time.monotonic() + pause > end:
                break
            time.sleep(pause)
        tries, pause = tries + 1, 0.0
        try:
            return _read(request, timeout_s, most)
        except urllib.error.HTTPError as error:
            problem = f"answered {error.code} {error.reason}"[:200]
            if error.code in range(300, 400):
                problem += " (redirects are not followed: give the final URL)"
            reached = error.code not in UNREACHABLE_STATUSES
            if error.code < 500 and error.code not in RETRIED_STATUSES:
                break
            wait = error.headers.get("Retry-After", "")
            pause = min(float(wait), timeout_s) if wait.isdecimal() else 0.0
        # URLError and timeouts are OSErrors
        except (OSError, http.client.HTTPException) as error:
            problem = f"did not answer ({getattr(error, 'reason', None) or error})"
            # URLError: it was not sent. After that, the request itself may be the cause
            reached = not isinstance(error, urllib.error.URLError)
    kind = ScorerError if reached else ScorerUnreachable
    raise kind(f"{url} {' '.join(problem.split())}, tries: {tries}")


def why_unreachable(url: str, timeout_s: float) -> str:
    """Return why the server of ``url`` would take no request now; "" if it answers anything else.

    Only its head is requested, with the rules of ``post``.
    """
    try:
        _read(urllib.request.Request(url, method="HEAD"), timeout_s, 0)
    except urllib.error.HTTPError as error:
        unreachable = error.code in UNREACHABLE_STATUSES
        return f"answered {error.code} {error.reason}"[:200] if unreachable else ""
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no valid URL
        return " ".join(f"did not answer ({getattr(error, 'reason', None) or error})".split())
    return ""


def _read(request: urllib.request.Request, timeout_s: float, most: int) -> bytes:
    """Send a request and return the body of the answer.

    Raises OSError if the request fails, ScorerError if the answer is too long.
    """
    body, deadline = b"", time.monotonic() + timeout_s
    with _opener(request.type == "http").open(request, timeout=timeout_s) as answer:
        while piece := answer.read1(CHUNK_BYTES):
            body += piece
            if len(body) > most:
                raise ScorerError(
                    f"{request.full_url} answered more than {most} bytes, which is too long for an"
                    " answer with scores"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(f"timed out after {timeout_s:g} s")
    return body


@functools.cache
def _opener(plain: bool) -> urllib.request.OpenerDirector:
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    if plain:
        handlers.append(urllib.request.ProxyHandler({}))  # a proxy could read the images
    return urllib.request.build_opener(*handlers)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that turns a redirect into an error, so that its target receives no images."""

    def redirect_request(self, *_: object) -> None:
        return None


def require_url(url: object, plain_http: object) -> None:
    """Raise ScorerSetupError unless images may be sent to ``url``."""
    if not isinstance(url, str) or not url.startswith(("http://", "https://")) or not _host(url):
        raise ScorerSetupError(f"url is {url!r}: give http://host:port/path or https://...")
    if not isinstance(plain_http, bool):
        raise ScorerSetupError(f"plain_http is {plain_http!r}: use true or false")
    if url.startswith("http://") and not plain_http and not _is_this_machine(_host(url) or ""):
        raise ScorerSetupError(
            f"url is {url!r}: images would be sent to another machine unencrypted: use https://,"
            " or set plain_http = true on a private network"
        )


def require_seconds(name: str, value: object) -> None:
    """Raise ScorerSetupError unless a setting is a positive, finite number of seconds."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value < float("inf")
    ):
        raise ScorerSetupError(f"{name} is {value!r}: use a positive time in seconds")


def _is_this_machine(host: str) -> bool:
    """Return True if a URL's host is a name or address of this machine; nothing is resolved."""
    try:
        return host in LOCAL_HOSTS or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host(url: str) -> str | None:
    """Return the host of a URL; None if it has none or its port is invalid."""
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.hostname if parts.port != 0 else None
    except ValueError:
        return None


def encode(
    encoding: str, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
) -> bytes:
    """Encode a request for images uint8 [B, 3, H, W].

    Each image that prompts edit is sent once, in ``sources``; ``image`` in a row of metadata is its
    index there.
    """
    sources: dict[int, np.ndarray] = {}
    rows: list[Metadata] = []
    for row in metadata:
        source = source_of(row)
        if source is not None:
            sources.setdefault(id(source), source)
            row = {**row, "image": list(sources).index(id(source))}
        rows.append(row)
    request: dict[str, object] = {"prompts": list(prompts), "metadata": rows}
    pixels = list(sources.values())
    if encoding == "json":
        sent = {"images": images, **({"sources": pixels} if pixels else {})}
        in_text = {name: [_png(image) for image in group] for name, group in sent.items()}
        return json.dumps(request | in_text).encode()
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(request).encode(), np.uint8)
    if pixels:
        np.savez(buffer, images=images, request=text, sources=np.stack(pixels))
    else:
        np.savez(buffer, images=images, request=text)
    return buffer.getvalue()


def decode(body: bytes, count: int) -> np.ndarray:
    """Decode the scores float32 [count] of an answer, NaN for null.

    Raises ScorerError if the answer is anything else.
    """
    try:
        scores = json.loads(body)["scores"]
        values = [float("nan") if score is None else score for score in scores]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ScorerError(
            f"the server's answer is not a JSON object with 'scores' ({type(error).__name__}):"
            f" {body[:80]!r}"
        ) from None
    if len(values) != count or not all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    ):
        raise ScorerError(
            f"the server answered {len(values)} scores for {count} images: it must return {count}"
            " numbers or nulls"
        )
    with np.errstate(over="ignore"):  # beyond float32 becomes infinite, which is no score
        return np.asarray([_number(value) for value in values], np.float32)


def _number(value: float) -> float:
    """Convert to float; an integer beyond its range becomes infinity."""
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _png(image: np.ndarray) -> str:
    buffer = io.BytesIO()
    to_pil(image).save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()
