"""A vision-language model as judge: any endpoint that speaks OpenAI's chat completions.

vLLM, SGLang and the clouds do. The image and a rubric go out, a number comes back: the expected
rating under the log-probabilities of the answer's first token (as in VQAScore, arXiv 2404.01291,
with ratings for its "Yes"), or the ``score`` of a JSON object that the endpoint is made to write.
What is neither is a failure.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from records.images import png_bytes
from rewards.base import (
    BuiltIn,
    Metadata,
    ScorerError,
    ScorerSetupError,
    Settings,
    require_count,
    require_images,
    require_one_of,
    source_of,
)
from rewards.cache import content_key
from rewards.server import post, require_seconds, require_url

READ = ("logprobs", "json")
TOP = 20
"""Log-probabilities per token that OpenAI gives at most."""
LEAST_MASS = 0.5
"""Less probability than this on ratings is an answer in words."""
RUBRIC = (
    "You judge images that were made from a prompt. Look at what the prompt asks for: objects,"
    " their number, colours, places and style; then at how well the image is made. Rate the image"
    " from {low} (nothing of it) to {high} (all of it, well made).\n\nPrompt: {prompt}"
)
EDITED = (
    "The prompt asks for an edit. The first image is the one to edit, the second is what came of"
    " it: rate the second. What the prompt does not ask to change should be as in the first.\n\n"
)
"""Before the rubric, where the prompt edits an image."""
ANSWER_BYTES = 2**20
"""Of a chat completion, at most: a rating with alternatives takes a few thousand."""
ASKED = {
    "logprobs": "\n\nAnswer with the number alone.",
    "json": '\n\nAnswer with a JSON object: {"score": number}.',
}


class NoRating(ValueError):
    """An answer that holds no rating. Says what it was."""


@dataclass(frozen=True)
class Rating:
    """One image's: mean of the votes in [0, 1], their deviation, tokens that were paid for."""

    score: float
    spread: float
    tokens_in: int
    tokens_out: int


class VlmScorer(BuiltIn):
    """A rating of each image, from ``low`` to ``high``, as a number in [0, 1].

    ``url`` is the endpoint's base, such as ``http://host:8000/v1``. ``rubric`` may name
    ``{prompt}``, ``{low}`` and ``{high}``. ``votes`` requests per image, with seeds of their own,
    are averaged; more than half of them must hold a rating. At most ``in_flight`` requests of this
    actor are under way. What may pass is tried again ``retries`` times, after pauses that double,
    or after what the endpoint says in Retry-After. The newest ``cache`` ratings are remembered.
    ``key_env`` names the environment variable that holds the key. Prices are per million tokens.
    Images and key go to ``url`` and nowhere else, and in plain http leave this machine only with
    ``plain_http``, as in ``HttpScorer``.
    """

    def __init__(
        self,
        url: str,
        model: str,
        rubric: str = RUBRIC,
        read: str = "logprobs",
        low: int = 1,
        high: int = 5,
        votes: int = 1,
        temperature: float = 0.0,
        in_flight: int = 8,
        timeout_s: float = 60.0,
        retries: int = 4,
        cache: int = 100_000,
        key_env: str | None = None,
        price_in: float = 0.0,
        price_out: float = 0.0,
        plain_http: bool = False,
    ) -> None:
        self.url, self.model, self.rubric, self.read = url, model, rubric, read
        self.low, self.high, self.votes, self.temperature = low, high, votes, temperature
        self.in_flight, self.timeout_s, self.retries = in_flight, timeout_s, retries
        self.cache, self.key_env = cache, key_env
        self.price_in, self.price_out, self.plain_http = price_in, price_out, plain_http
        self.check(vars(self))
        self._headers = _headers(key_env)
        self._known: OrderedDict[bytes, Rating] = OrderedDict()
        self.parts: dict[str, np.ndarray] = {}

    @staticmethod
    def check(settings: Settings) -> None:
        """Raises ScorerSetupError for settings with which no judge can be asked."""
        require_url(settings["url"], settings["plain_http"])
        require_seconds("timeout_s", settings["timeout_s"])
        require_one_of("read", settings["read"], READ)
        for name, least in (("votes", 1), ("in_flight", 1), ("retries", 0), ("cache", 0)):
            require_count(name, settings[name], least)
        low, high = settings["low"], settings["high"]
        for name, value in (("low", low), ("high", high)):
            require_count(name, value, 0)
        if low >= high:
            raise ScorerSetupError(f"low is {low}, high is {high}: low must be the lower")
        if settings["read"] == "logprobs" and high > 9:
            raise ScorerSetupError(
                f"high is {high}: log-probabilities are read of one token, so use 9 at most, or"
                " read = 'json'"
            )
        if "{prompt}" not in settings["rubric"]:
            raise ScorerSetupError(
                "rubric has no {prompt}: the judge would not know what was asked"
            )
        if settings["votes"] > 1 and not settings["temperature"]:
            raise ScorerSetupError(
                f"votes is {settings['votes']} at temperature 0: they would all be the same; set"
                " temperature"
            )

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        """uint8 [B, 3, H, W] -> float32 [B] in [0, 1], NaN where the judge gave no rating.

        Raises ScorerError where it gave none at all, or does not answer.
        """
        require_images(images, prompts, metadata)
        keys = [content_key(*row) for row in zip(images, prompts, metadata, strict=True)]
        fresh = {key: row for row, key in enumerate(keys) if key not in self._known}
        with ThreadPoolExecutor(self.in_flight) as pool:
            asked = {
                key: [
                    pool.submit(self._vote, images[row], source_of(metadata[row]), prompts[row], v)
                    for v in range(self.votes)
                ]
                for key, row in fresh.items()
            }
        rated: dict[bytes, Rating] = {key: self._known[key] for key in keys if key in self._known}
        problems: list[str] = []
        for key, votes in asked.items():
            try:
                rated[key] = _mean([_outcome(vote) for vote in votes])
            except NoRating as error:
                problems.append(str(error))
        if problems and not rated:
            raise ScorerError(f"{self.url} {self.model}: {problems[0]}")
        self._keep({key: rated[key] for key in fresh if key in rated})
        self.parts = self._parts([rated.get(key) for key in keys], set(fresh), keys)
        scores = [rated[key].score if key in rated else math.nan for key in keys]
        return np.asarray(scores, np.float32)

    def _vote(
        self, image: np.ndarray, source: np.ndarray | None, prompt: str, vote: int
    ) -> tuple[float, int, int]:
        """(rating in [0, 1], tokens in, tokens out) of one request.

        Raises NoRating, or ScorerError where the endpoint does not answer.
        """
        body = json.dumps(self._request(image, source, prompt, vote)).encode()
        url = f"{self.url.rstrip('/')}/chat/completions"
        answer = post(url, body, self._headers, self.timeout_s, self.retries, ANSWER_BYTES)
        try:
            told = json.loads(answer)
            choice, usage = told["choices"][0], told.get("usage") or {}
        except (ValueError, KeyError, IndexError, TypeError):
            raise NoRating(f"the answer is no chat completion: {answer[:80]!r}") from None
        read = self._expected if self.read == "logprobs" else self._written
        value = read(choice)
        return (
            (value - self.low) / (self.high - self.low),
            int(usage.get("prompt_tokens") or 0),
            int(usage.get("completion_tokens") or 0),
        )

    def _request(
        self, image: np.ndarray, source: np.ndarray | None, prompt: str, vote: int
    ) -> dict[str, Any]:
        text = self.rubric.replace("{low}", str(self.low)).replace("{high}", str(self.high))
        # the prompt last: what is in braces there stays as it is
        text = text.replace("{prompt}", prompt)
        shown = [image] if source is None else [source, image]
        before = "" if source is None else EDITED
        content = [
            *(_shown(one) for one in shown),
            {"type": "text", "text": before + text + ASKED[self.read]},
        ]
        told: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": self.temperature,
            "seed": vote,
        }
        if self.read == "logprobs":
            return {**told, "max_tokens": 1, "logprobs": True, "top_logprobs": TOP}
        score = {"type": "number", "minimum": self.low, "maximum": self.high}
        schema = {
            "type": "object",
            "properties": {"score": score},
            "required": ["score"],
            "additionalProperties": False,
        }
        named = {"name": "rating", "schema": schema, "strict": True}
        return {**told, "response_format": {"type": "json_schema", "json_schema": named}}

    def _expected(self, choice: Any) -> float:
        """Mean rating under the first token's distribution, over the tokens that are ratings."""
        try:
            tokens = choice["logprobs"]["content"][0]["top_logprobs"]
            pairs = [(str(one["token"]).strip(), math.exp(one["logprob"])) for one in tokens]
        except (KeyError, IndexError, TypeError, OverflowError):
            raise NoRating(
                "the answer has no log-probabilities: use read = 'json' with this endpoint"
            ) from None
        ratings = {str(value): value for value in range(self.low, self.high + 1)}
        found = [(ratings[token], mass) for token, mass in pairs if token in ratings]
        mass = math.fsum(mass for _, mass in found)
        if not mass >= LEAST_MASS:
            likely = max(pairs, key=lambda pair: pair[1])[0] if pairs else ""
            raise NoRating(
                f"the judge answers {likely!r} rather than a number: {mass:.0%} on"
                f" {self.low} to {self.high}"
            )
        return math.fsum(value * share for value, share in found) / mass

    def _written(self, choice: Any) -> float:
        """The ``score`` of the JSON object that was written."""
        try:
            text = choice["message"]["content"]
            value = json.loads(text)["score"]
        except (ValueError, KeyError, TypeError):
            raise NoRating(f"the judge answers prose: {_short(choice)!r}") from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise NoRating(f"the judge's score is {value!r}, which is no number")
        if not self.low <= value <= self.high:
            raise NoRating(f"the judge's score is {value}, outside {self.low} to {self.high}")
        return float(value)

    def _keep(self, ratings: dict[bytes, Rating]) -> None:
        self._known |= ratings
        while len(self._known) > self.cache:
            self._known.popitem(last=False)

    def _parts(
        self, rows: Sequence[Rating | None], fresh: set[bytes], keys: Sequence[bytes]
    ) -> dict[str, np.ndarray]:
        """float32 [B] each: deviation of the votes, and what was paid for each image now."""
        paid: list[tuple[int, int]] = []
        for row, key in zip(rows, keys, strict=True):
            paid.append((row.tokens_in, row.tokens_out) if row and key in fresh else (0, 0))
            fresh.discard(key)  # once, where an image is there twice
        tokens = np.asarray(paid, np.float64).reshape(-1, 2)
        cost = tokens @ np.array([self.price_in, self.price_out]) / 1e6
        spread = np.array([row.spread if row else math.nan for row in rows], np.float32)
        return {
            "spread": spread,
            "tokens": tokens.sum(1).astype(np.float32),
            "cost": cost.astype(np.float32),
        }


def _shown(image: np.ndarray) -> dict[str, Any]:
    encoded = base64.b64encode(png_bytes(image)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


def _headers(key_env: str | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if key_env is None:
        return headers
    if not (key := os.environ.get(key_env)):
        raise ScorerSetupError(
            f"key_env is {key_env!r}: there is no such variable where this scorer runs: set it in"
            " the environment of its actors"
        )
    return {**headers, "Authorization": f"Bearer {key}"}


def _outcome(vote: Any) -> tuple[float, int, int] | NoRating:
    """What became of a vote. No answer is no rating either: others' ratings need not be lost."""
    try:
        return vote.result()
    except NoRating as error:
        return error
    except ScorerError as error:
        return NoRating(str(error))


def _mean(votes: Sequence[tuple[float, int, int] | NoRating]) -> Rating:
    """Raises NoRating unless more than half of the votes hold a rating."""
    good = [vote for vote in votes if not isinstance(vote, NoRating)]
    bad = [vote for vote in votes if isinstance(vote, NoRating)]
    if 2 * len(good) <= len(votes):
        raise NoRating(f"{bad[0]} ({len(bad)} of {len(votes)} votes)")
    scores = np.array([score for score, _, _ in good], np.float64)
    return Rating(
        float(scores.mean()),
        float(scores.std()),
        sum(tokens for _, tokens, _ in good),
        sum(tokens for _, _, tokens in good),
    )


def _short(choice: Any) -> str:
    message = choice.get("message") if isinstance(choice, dict) else None
    text = message.get("content") if isinstance(message, dict) else choice
    return " ".join(str(text).split())[:60]
