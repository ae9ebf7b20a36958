"""Scores from a reward server over HTTP (docs/rewards.md). No answer of it can run code."""

from __future__ import annotations

import base64
import http.client
import io
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from rewards.base import (
    BuiltIn,
    Metadata,
    ScorerError,
    ScorerSetupError,
    Settings,
    require_count,
    require_images,
    require_one_of,
)

TYPES = {"npz": "application/x-npz", "json": "application/json"}
AGAIN = (408, 425, 429)  # worth another try besides the 5xx: timed out, too early, too many
PAUSE_S = 0.5  # before the second try; doubles with every further one


class HttpScorer(BuiltIn):
    """POSTs images and prompts to ``url`` and takes the scores of the answer.

    ``encoding`` npz sends raw pixels, json sends PNG in base64. An answer that does not come within
    ``timeout_s``, a broken connection and a 5xx are tried again ``retries`` times; keep (retries +
    1) x timeout_s below the deadline of the service that asks. ``batch_size`` 0 sends all at once.
    """

    def __init__(
        self,
        url: str,
        encoding: str = "npz",
        timeout_s: float = 60.0,
        retries: int = 2,
        batch_size: int = 0,
    ) -> None:
        self.url, self.encoding, self.timeout_s = url, encoding, timeout_s
        self.retries, self.batch_size = retries, batch_size
        self.check(vars(self))

    @staticmethod
    def check(settings: Settings) -> None:
        """Raises ScorerSetupError for settings with which no server can be asked."""
        require_url(settings["url"])
        require_one_of("encoding", settings["encoding"], TYPES)
        require_seconds("timeout_s", settings["timeout_s"])
        require_count("retries", settings["retries"], 0)
        require_count("batch_size", settings["batch_size"], 0)

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        """uint8 [B, 3, H, W] -> float32 [B], NaN where the server says null. Raises ScorerError."""
        require_images(images, prompts, metadata)
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
        return decode(post(self.url, body, headers, self.timeout_s, self.retries), len(images))


def post(
    url: str, body: bytes, headers: Mapping[str, str], timeout_s: float, retries: int
) -> bytes:
    """What ``url`` answers. What may pass is tried again, after pauses that double.

    Where the answer says in Retry-After how many seconds to wait, so long, up to ``timeout_s``.
    Raises ScorerError.
    """
    request = urllib.request.Request(url, body, dict(headers))
    problem, pause = "", 0.0
    for attempt in range(retries + 1):
        if attempt:
            time.sleep(max(pause, PAUSE_S * 2 ** (attempt - 1)))
        pause = 0.0
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            problem = f"answered {error.code} {error.reason}"
            if error.code < 500 and error.code not in AGAIN:
                break
            wait = error.headers.get("Retry-After", "")
            pause = min(float(wait), timeout_s) if wait.isdecimal() else 0.0
        # URLError and timeouts are OSErrors
        except (OSError, http.client.HTTPException) as error:
            problem = f"did not answer ({getattr(error, 'reason', None) or error})"
    raise ScorerError(f"{url} {problem}, tries: {attempt + 1}")


def require_url(url: object) -> None:
    """Raise ScorerSetupError unless ``url`` can be asked."""
    if not isinstance(url, str) or not url.startswith(("http://", "https://")) or not _host(url):
        raise ScorerSetupError(f"url is {url!r}: give http://host:port/path or https://...")


def require_seconds(name: str, value: object) -> None:
    """Raise ScorerSetupError unless a setting is a positive time."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value < float("inf")
    ):
        raise ScorerSetupError(f"{name} is {value!r}: use a positive time in seconds")


def _host(url: str) -> str | None:
    """The host of a URL; None where there is none, or no number for a port."""
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.hostname if parts.port != 0 else None
    except ValueError:
        return None


def encode(
    encoding: str, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
) -> bytes:
    """The body of a request for images uint8 [B, 3, H, W]."""
    told: dict[str, object] = {"prompts": list(prompts), "metadata": list(metadata)}
    if encoding == "json":
        return json.dumps(told | {"images": [_png(image) for image in images]}).encode()
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(told).encode(), np.uint8)
    np.savez(buffer, images=images, request=text)
    return buffer.getvalue()


def decode(body: bytes, count: int) -> np.ndarray:
    """The scores float32 [count] of an answer, NaN for null. Raises ScorerError for another."""
    try:
        scores = json.loads(body)["scores"]
        values = [float("nan") if score is None else score for score in scores]
    except (ValueError, KeyError, TypeError) as error:
        raise ScorerError(
            f"the server's answer is no JSON object with 'scores' ({type(error).__name__}):"
            f" {body[:80]!r}"
        ) from None
    if len(values) != count or not all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    ):
        raise ScorerError(
            f"the server answered {len(values)} scores for {count} images: it must answer {count}"
            " numbers or nulls"
        )
    return np.asarray(values, np.float32)


def _png(image: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()
