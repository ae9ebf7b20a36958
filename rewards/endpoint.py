"""Client of a judge's endpoint: OpenAI's chat completions, as served by vLLM, SGLang and clouds."""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from configs.section import Tree
from records.images import png_bytes
from rewards.base import (
    BuiltIn,
    ScorerError,
    ScorerSetupError,
    ScorerUnreachable,
    Settings,
    require_count,
)
from rewards.server import post, require_seconds, require_url

MAX_ANSWER_BYTES = 2**20
"""Most bytes of a chat completion: a rating with alternatives takes a few thousand."""
TOP_LOGPROBS = 20
"""Most log-probabilities per token that OpenAI returns."""
EDITED = (
    "The prompt asks for an edit of this image:",
    "What the prompt does not ask to change should be as it is there. What came of it:",
)
"""Texts before and after the source image of an edit."""
MIN_MASS = 0.5
"""Least total probability of the requested tokens; below it, the judge answered in words."""
T = TypeVar("T")


class NoVerdict(ValueError):
    """An answer holds no rating or ranking; the message quotes it."""


class NoAnswer(NoVerdict):
    """The endpoint cannot be reached now."""


@dataclass(frozen=True)
class Answer:
    """First choice of a chat completion, and the tokens that were paid for."""

    choice: Any
    tokens_in: int
    tokens_out: int


@dataclass(eq=False)
class Judge(BuiltIn):
    """Base class of scorers that query an endpoint at ``url``, such as ``http://host:8000/v1``.

    An actor has at most ``in_flight`` requests in progress. A failure that may be temporary is
    retried ``retries`` times, with exponential backoff or after the delay in Retry-After. An answer
    has at most ``max_tokens`` tokens: without a limit a model that does not end would write until
    its context is full, within any JSON schema, and again in each retry. The
    newest ``cache`` verdicts are cached. ``key_env`` names the environment variable that holds the
    API key. Prices are per million tokens. Images and key are sent to ``url`` only, and leave this
    machine over plain http only with ``plain_http``, as in ``HttpScorer``.
    """

    url: str
    model: str
    temperature: float = 0.0
    in_flight: int = 8
    timeout_s: float = 60.0
    retries: int = 4
    max_tokens: int = 512
    cache: int = 100_000
    key_env: str | None = None
    price_in: float = 0.0
    price_out: float = 0.0
    plain_http: bool = False

    def __post_init__(self) -> None:
        """Raise ScorerSetupError if settings are invalid or the API key's variable is not set."""
        self.check(vars(self))
        if self.key_env is not None and not os.environ.get(self.key_env):
            raise ScorerSetupError(
                f"key_env is {self.key_env!r}: this variable is not set where the scorer runs: set"
                " it in the environment of its actors"
            )
        self.parts: dict[str, np.ndarray] = {}

    @staticmethod
    def check(settings: Settings) -> None:
        """Raise ScorerSetupError if settings of the requests are invalid."""
        require_url(settings["url"], settings["plain_http"])
        require_seconds("timeout_s", settings["timeout_s"])
        for name, least in (("in_flight", 1), ("retries", 0), ("cache", 0), ("max_tokens", 1)):
            require_count(name, settings[name], least)
        if "{prompt}" not in settings["rubric"]:
            raise ScorerSetupError("rubric has no {prompt}: the judge would not see the prompt")

    @property
    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key_env is None:
            return headers
        return {**headers, "Authorization": f"Bearer {os.environ[self.key_env]}"}

    def ask(
        self, content: Sequence[Mapping[str, Any]], seed: int, form: Mapping[str, Any]
    ) -> Answer:
        """Send one message of images and text, and return the answer.

        ``form``: request fields that constrain the answer. Raises NoVerdict if the answer is not a
        chat completion, and ScorerError if there is no answer.
        """
        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": list(content)}],
            "temperature": self.temperature,
            "seed": seed,
            "max_tokens": self.max_tokens,
            **form,
        }
        url = f"{self.url.rstrip('/')}/chat/completions"
        body = json.dumps(request).encode()
        answer = post(url, body, self._headers, self.timeout_s, self.retries, MAX_ANSWER_BYTES)
        try:
            completion = json.loads(answer)
            choice, usage = completion["choices"][0], completion.get("usage") or {}
            tokens = (int(usage.get(f"{kind}_tokens") or 0) for kind in ("prompt", "completion"))
            return Answer(choice, *tokens)
        except (
            LookupError,
            ValueError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ):
            raise NoVerdict(f"the answer is not a chat completion: {answer[:80]!r}") from None


def image_part(image: np.ndarray) -> Tree:
    """Return an image uint8 [3, H, W] as a part of a message."""
    encoded = base64.b64encode(png_bytes(image)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


def text_part(text: str) -> Tree:
    """Return text as a part of a message."""
    return {"type": "text", "text": text}


def source_parts(source: np.ndarray | None) -> list[Tree]:
    """Return the parts that precede an edit of ``source``, uint8 [3, H, W]; none if it is None."""
    if source is None:
        return []
    before, after = EDITED
    return [text_part(before), image_part(source), text_part(after)]


def one_token() -> Tree:
    """Return request fields for an answer of one token with its most likely alternatives."""
    return {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP_LOGPROBS}


def json_object(name: str, field: str, schema: Mapping[str, Any]) -> Tree:
    """Return request fields for an answer that is a JSON object with one ``field``."""
    whole = {
        "type": "object",
        "properties": {field: dict(schema)},
        "required": [field],
        "additionalProperties": False,
    }
    named = {"name": name, "schema": whole, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def json_field(choice: Any, field: str) -> Any:
    """Return a ``field`` of the JSON object in an answer. Raises NoVerdict for prose."""
    try:
        return json.loads(choice["message"]["content"])[field]
    except (ValueError, KeyError, TypeError, RecursionError):
        if isinstance(choice, dict) and choice.get("finish_reason") == "length":
            raise NoVerdict(
                f"the judge's answer was cut off: raise max_tokens: {_short(choice)!r}"
            ) from None
        raise NoVerdict(
            f"the judge's answer is not the expected JSON: {_short(choice)!r}"
        ) from None


def text_of(choice: Any) -> tuple[str, bool]:
    """Return an answer's text, and False if it was cut off. Raises NoVerdict without a text."""
    try:
        return str(choice["message"]["content"] or ""), choice.get("finish_reason") != "length"
    except (KeyError, TypeError, AttributeError):
        raise NoVerdict(f"the answer contains no text: {_short(choice)!r}") from None


def expected_value(choice: Any, values: Mapping[str, float], what: str) -> float:
    """Return the expectation of ``values`` under the distribution of an answer's first token.

    ``values`` maps tokens to numbers; other tokens are ignored. ``what`` describes the tokens in
    messages. Raises NoVerdict without log-probabilities, or if the tokens of ``values`` have less
    than ``MIN_MASS`` together.
    """
    try:
        tokens = choice["logprobs"]["content"][0]["top_logprobs"]
        pairs = [
            (str(alternative["token"]).strip(), math.exp(alternative["logprob"]))
            for alternative in tokens
        ]
    except (KeyError, IndexError, TypeError, OverflowError):
        raise NoVerdict(
            "the answer has no log-probabilities: use read = 'json' with this endpoint"
        ) from None
    matches = [(values[token], mass) for token, mass in pairs if token in values]
    mass = math.fsum(mass for _, mass in matches)
    if not mass >= MIN_MASS:
        likely = max(pairs, key=lambda pair: pair[1])[0] if pairs else ""
        raise NoVerdict(f"the judge answers {likely!r} instead of a number: {mass:.0%} on {what}")
    return math.fsum(value * share for value, share in matches) / mass


def result_or_no_verdict(ask: Callable[[], T]) -> T | NoVerdict:
    """Call ``ask`` and return its result, or NoVerdict if it fails, so that others are not lost."""
    try:
        return ask()
    except NoVerdict as error:
        return error
    except ScorerUnreachable as error:
        return NoAnswer(str(error))
    except ScorerError as error:
        return NoVerdict(str(error))


def require_reached(results: Sequence[object]) -> None:
    """Raise ScorerUnreachable if every one of the requests found no endpoint."""
    lost = [result for result in results if isinstance(result, NoAnswer)]
    if lost and len(lost) == len(results):
        raise ScorerUnreachable(str(lost[0]))


def _short(choice: Any) -> str:
    """Return the beginning of an answer, for messages."""
    message = choice.get("message") if isinstance(choice, dict) else None
    text = message.get("content") if isinstance(message, dict) else choice
    return " ".join(str(text).split())[:60]
