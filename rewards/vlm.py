"""Vision-language model as a judge, on any endpoint that implements OpenAI's chat completions.

An image and a rubric are sent. The score is read from the answer in one of three ways: the expected
rating under the log-probabilities of its first token (as in VQAScore, arXiv 2404.01291, with
ratings instead of "Yes"); the ``score`` of a JSON object that the request enforces; or numbers in a
text that follow words that a reward model was trained to write. Any other answer is a failure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rewards.answers import numbers_after
from rewards.base import (
    Metadata,
    ScorerError,
    ScorerSetupError,
    Settings,
    require_count,
    require_images,
    require_one_of,
    source_of,
)
from rewards.cache import FifoCache, content_key
from rewards.endpoint import (
    Judge,
    NoVerdict,
    expected_value,
    image_part,
    json_field,
    json_object,
    one_token,
    require_reached,
    result_or_no_verdict,
    source_parts,
    text_of,
    text_part,
)

READ = ("logprobs", "json", "text")
RUBRIC = (
    "You judge images that were made from a prompt. Look at what the prompt asks for: objects,"
    " their number, colours, places and style; then at how well the image is made. Rate the image"
    " from {low} (nothing of it) to {high} (all of it, well made).\n\nPrompt: {prompt}"
)
OUTPUT_INSTRUCTIONS = {
    "logprobs": "\n\nAnswer with the number alone.",
    "json": '\n\nAnswer with a JSON object: {"score": number}.',
    "text": "",
}
Vote = tuple[float, int, int]
"""Rating in [0, 1], input tokens, output tokens."""


@dataclass(frozen=True)
class Rating:
    """Rating of one image: mean of the votes in [0, 1], their deviation, tokens paid for."""

    score: float
    spread: float
    tokens_in: int
    tokens_out: int


@dataclass(eq=False)
class VlmScorer(Judge):
    """Judge that rates each image from ``low`` to ``high``; the score is scaled to [0, 1].

    ``rubric`` may contain ``{prompt}``, ``{low}`` and ``{high}``. With ``read`` "text", the rating
    is the mean of the numbers that follow each of the words ``after``. ``votes`` requests per
    image, each with its own seed, are averaged; more than half of them must yield a rating. Other
    settings are those of ``Judge``.
    """

    rubric: str = RUBRIC
    read: str = "logprobs"
    after: Sequence[str] = ()
    low: int = 1
    high: int = 5
    votes: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._cache = FifoCache[Rating](self.cache)

    @staticmethod
    def check(settings: Settings) -> None:
        """Raise ScorerSetupError if settings are invalid."""
        Judge.check(settings)
        require_one_of("read", settings["read"], READ)
        require_count("votes", settings["votes"], 1)
        after = settings["after"]
        listed = not isinstance(after, str) and all(
            isinstance(word, str) and word for word in after
        )
        if not listed or bool(after) != (settings["read"] == "text"):
            raise ScorerSetupError(
                f"after is {after!r}: read = 'text' needs a list of the words before a number,"
                ' such as ["Final Score:"], and other values of read do not use it'
            )
        low, high = settings["low"], settings["high"]
        for name, value in (("low", low), ("high", high)):
            require_count(name, value, 0)
        if low >= high:
            raise ScorerSetupError(f"low is {low}, high is {high}: low must be lower than high")
        if settings["read"] == "logprobs" and high > 9:
            raise ScorerSetupError(
                f"high is {high}: log-probabilities are read from one token, so use at most 9, or"
                " read = 'json'"
            )
        if settings["votes"] > 1 and not settings["temperature"]:
            raise ScorerSetupError(
                f"votes is {settings['votes']} at temperature 0, so all votes would be equal: set"
                " temperature"
            )

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        """Score uint8 [B, 3, H, W] as float32 [B] in [0, 1], NaN for an image without a rating.

        Raises ScorerError if no image has a rating, as ScorerUnreachable if no request found the
        endpoint.
        """
        require_images(images, prompts, metadata)
        keys = [content_key(*row) for row in zip(images, prompts, metadata, strict=True)]
        cached = {key: rating for key in keys if (rating := self._cache.get(key)) is not None}
        fresh = {key: row for row, key in enumerate(keys) if key not in cached}
        new, problem = self._ask(images, prompts, metadata, fresh)
        rated = cached | new
        if problem and not rated:
            raise ScorerError(f"{self.url} {self.model}: {problem}")
        self._cache.add(new)
        self.parts = self._parts([rated.get(key) for key in keys], set(fresh), keys)
        scores = [rated[key].score if key in rated else math.nan for key in keys]
        return np.asarray(scores, np.float32)

    def _ask(
        self,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[Metadata],
        fresh: dict[bytes, int],
    ) -> tuple[dict[bytes, Rating], str]:
        """Return (ratings of the rows of ``fresh`` by content key, the first problem or "").

        Raises ScorerUnreachable if no request found the endpoint.
        """
        with ThreadPoolExecutor(self.in_flight) as pool:
            pending = {
                key: [
                    pool.submit(
                        result_or_no_verdict,
                        partial(
                            self._vote, images[row], source_of(metadata[row]), prompts[row], vote
                        ),
                    )
                    for vote in range(self.votes)
                ]
                for key, row in fresh.items()
            }
        answers = {key: [vote.result() for vote in votes] for key, votes in pending.items()}
        require_reached([answer for votes in answers.values() for answer in votes])
        rated: dict[bytes, Rating] = {}
        problem = ""
        for key, votes in answers.items():
            try:
                rated[key] = _mean(votes)
            except NoVerdict as error:
                problem = problem or str(error)
        return rated, problem

    def _vote(self, image: np.ndarray, source: np.ndarray | None, prompt: str, vote: int) -> Vote:
        """Request one rating.

        Raises NoVerdict if the answer has none, ScorerError if the endpoint does not answer.
        """
        text = self.rubric.replace("{low}", str(self.low)).replace("{high}", str(self.high))
        # the prompt is inserted last, so that braces in it are not replaced
        text = text.replace("{prompt}", prompt) + OUTPUT_INSTRUCTIONS[self.read]
        number = {"type": "number", "minimum": self.low, "maximum": self.high}
        form = {
            "logprobs": one_token(),
            "json": json_object("rating", "score", number),
            "text": {},
        }[self.read]
        content = [*source_parts(source), image_part(image), text_part(text)]
        answer = self.ask(content, vote, form)
        score = (self._rating(answer.choice) - self.low) / (self.high - self.low)
        return score, answer.tokens_in, answer.tokens_out

    def _rating(self, choice: Any) -> float:
        """Read a rating from ``low`` to ``high``. Raises NoVerdict if there is none."""
        if self.read == "logprobs":
            ratings = {str(value): value for value in range(self.low, self.high + 1)}
            return expected_value(choice, ratings, f"{self.low} to {self.high}")
        if self.read == "json":
            return self._score_from_json(choice)
        text, ended = text_of(choice)
        numbers = numbers_after(text, self.after, self.low, self.high, ended)
        if numbers is None:
            raise NoVerdict(
                f"the judge's answer has no number from {self.low} to {self.high} after"
                f" {' and '.join(self.after)}: {' '.join(text.split())[:60]!r}"
            )
        return sum(numbers) / len(numbers)

    def _score_from_json(self, choice: Any) -> float:
        """Read the ``score`` of a JSON object. Raises NoVerdict if it is no number in range."""
        value = json_field(choice, "score")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise NoVerdict(f"the judge's score is {value!r}, which is not a number")
        if not self.low <= value <= self.high:
            raise NoVerdict(f"the judge's score is {value}, outside {self.low} to {self.high}")
        return float(value)

    def _parts(
        self, rows: Sequence[Rating | None], fresh: set[bytes], keys: Sequence[bytes]
    ) -> dict[str, np.ndarray]:
        """Return float32 [B] each: deviation of the votes, tokens and cost of this call."""
        paid: list[tuple[int, int]] = []
        for row, key in zip(rows, keys, strict=True):
            paid.append((row.tokens_in, row.tokens_out) if row and key in fresh else (0, 0))
            fresh.discard(key)  # an image that occurs twice is paid for once
        tokens = np.asarray(paid, np.float64).reshape(-1, 2)
        cost = tokens @ np.array([self.price_in, self.price_out]) / 1e6
        spread = np.array([row.spread if row else math.nan for row in rows], np.float32)
        return {
            "spread": spread,
            "tokens": tokens.sum(1).astype(np.float32),
            "cost": cost.astype(np.float32),
        }


def _mean(votes: Sequence[Vote | NoVerdict]) -> Rating:
    """Average votes. Raises NoVerdict unless more than half of them hold a rating."""
    good = [vote for vote in votes if not isinstance(vote, NoVerdict)]
    bad = [vote for vote in votes if isinstance(vote, NoVerdict)]
    if 2 * len(good) <= len(votes):
        raise NoVerdict(f"{bad[0]} ({len(bad)} of {len(votes)} votes)")
    scores = np.array([score for score, _, _ in good], np.float64)
    return Rating(
        float(scores.mean()),
        float(scores.std()),
        sum(tokens for _, tokens, _ in good),
        sum(tokens for _, _, tokens in good),
    )
