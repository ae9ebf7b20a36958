"""Vision-language model as a judge that compares a prompt's images, two or several at a time.

A judge that gives most images the same rating can still tell which of two is better. One request
shows it ``size`` images of a prompt; the results of many requests, on randomly drawn lists of
images, are converted to one score per image by the Bradley-Terry model.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import xxhash

from configs.section import Tree
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
    text_part,
)
from rewards.preference import consistency, count_wins, random_lists, win_probabilities

READ = ("json", "logprobs")
RUBRIC = (
    "You compare images that were made from one prompt. Look at what the prompt asks for: objects,"
    " their number, colours, places and style; then at how well each image is made.\n\n"
    "Prompt: {prompt}"
)
OUTPUT_INSTRUCTIONS = {
    "logprobs": "\n\nWhich image is better, 1 or 2? Answer with the number alone.",
    "json": '\n\nAnswer with a JSON object: {"ranking": the numbers of all images, best first}.',
}


@dataclass(frozen=True)
class Verdict:
    """Result for a list of k images.

    ``wins``, float64 [k, k]: probability that image i of the list is better than image j.
    """

    wins: np.ndarray
    tokens_in: int
    tokens_out: int


@dataclass(eq=False)
class VlmRankScorer(Judge):
    """Judge that scores an image by its chance, in (0, 1), to beat an average one of its prompt.

    Every image is in ``rounds`` lists of ``size`` images, which each round redraws. ``read``:
    ``json`` requests the ranking of a list; ``logprobs``, for two images only, uses the
    probabilities of "1" and "2" as fractions of a win. Lists and the order in them are seeded by
    the images' content, so they depend neither on the order of the batch nor on retries. A list
    without a verdict is ignored; an image that is only in such lists has no score.

    Scores are comparable within one prompt only: their mean over a prompt's images is near one
    half, however good the images are. Other settings are those of ``Judge``.
    """

    compares: ClassVar[bool | None] = True

    rubric: str = RUBRIC
    read: str = "json"
    size: int = 4
    rounds: int = 3
    timeout_s: float = 120.0
    cache: int = 10_000

    def __post_init__(self) -> None:
        super().__post_init__()
        self._cache = FifoCache[Verdict](self.cache)

    @staticmethod
    def check(settings: Settings) -> None:
        """Raise ScorerSetupError if settings are invalid."""
        Judge.check(settings)
        require_one_of("read", settings["read"], READ)
        require_count("size", settings["size"], 2)
        require_count("rounds", settings["rounds"], 1)
        if settings["read"] == "logprobs" and settings["size"] != 2:
            raise ScorerSetupError(
                f"size is {settings['size']}: log-probabilities are read from one token, which can"
                " choose between two images only: use size = 2, or read = 'json'"
            )

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> np.ndarray:
        """Score uint8 [N, 3, H, W], all of one prompt, as float32 [N]; NaN without a verdict.

        Raises ScorerError if no list has a verdict, or unless there are at least two images, all of
        one prompt.
        """
        require_images(images, prompts, metadata)
        if len(set(prompts)) > 1 or len(images) < 2:
            raise ScorerError(
                f"{len(images)} images of {len(set(prompts))} prompts: at least two images of one"
                " prompt are compared"
            )
        keys = [content_key(*row) for row in zip(images, prompts, metadata, strict=True)]
        by_content = np.array(sorted(range(len(keys)), key=lambda row: keys[row]))
        seed = xxhash.xxh3_64_intdigest(b"".join(sorted(keys)))
        lists = [by_content[rows] for rows in random_lists(len(keys), self.size, self.rounds, seed)]
        wins = np.zeros((len(images), len(images)))
        source = source_of(metadata[0])
        for rows, verdict in self._verdicts(images, source, prompts[0], keys, lists):
            wins[np.ix_(rows, rows)] += verdict.wins
        scores = win_probabilities(wins)
        self.parts["consistency"] = consistency(wins, scores)
        return scores

    def _verdicts(
        self,
        images: np.ndarray,
        source: np.ndarray | None,
        prompt: str,
        keys: Sequence[bytes],
        lists: Sequence[np.ndarray],
    ) -> list[tuple[np.ndarray, Verdict]]:
        """Return the lists that have a verdict, with it.

        Raises ScorerError if no list has one, as ScorerUnreachable if no request found the
        endpoint.
        """
        by_name = {b"".join(keys[row] for row in rows): rows for rows in lists}
        cached = {
            name: verdict for name in by_name if (verdict := self._cache.get(name)) is not None
        }
        with ThreadPoolExecutor(self.in_flight) as pool:
            pending = {
                name: pool.submit(
                    result_or_no_verdict, partial(self._ask, images[rows], source, prompt)
                )
                for name, rows in by_name.items()
                if name not in cached
            }
        answers = {name: answer.result() for name, answer in pending.items()}
        require_reached(list(answers.values()))
        new = {name: verdict for name, verdict in answers.items() if isinstance(verdict, Verdict)}
        if not (cached or new):
            problem = next(iter(answers.values()))
            raise ScorerError(f"{self.url} {self.model}: {problem}")
        self._cache.add(new)
        self._count_cost(list(new.values()), len(images))
        verdicts = cached | new
        return [(by_name[name], verdict) for name, verdict in verdicts.items()]

    def _ask(self, images: np.ndarray, source: np.ndarray | None, prompt: str) -> Verdict:
        """Request the verdict on a list of images uint8 [k, 3, H, W].

        Raises NoVerdict if the answer has none, ScorerError if the endpoint does not answer.
        """
        content = source_parts(source)
        for number, image in enumerate(images, 1):
            content += [text_part(f"Image {number}:"), image_part(image)]
        # the prompt is inserted last, so that braces in it are not replaced
        content.append(
            text_part(self.rubric.replace("{prompt}", prompt) + OUTPUT_INSTRUCTIONS[self.read])
        )
        if self.read == "logprobs":
            answer = self.ask(content, 0, one_token())
            wins = _better_of_two(answer.choice)
        else:
            answer = self.ask(content, 0, _ranking_form(len(images)))
            wins = count_wins(_ranking(answer.choice, len(images)), len(images))
        return Verdict(wins, answer.tokens_in, answer.tokens_out)

    def _count_cost(self, verdicts: Sequence[Verdict], images: int) -> None:
        """Divide the tokens and cost of this call's requests equally among the images."""
        paid = [sum(v.tokens_in for v in verdicts), sum(v.tokens_out for v in verdicts)]
        cost = (paid[0] * self.price_in + paid[1] * self.price_out) / 1e6
        self.parts = {
            "tokens": np.full(images, sum(paid) / images, np.float32),
            "cost": np.full(images, cost / images, np.float32),
        }


def _ranking_form(count: int) -> Tree:
    numbers = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": count}}
    return json_object("ranking", "ranking", {**numbers, "minItems": count, "maxItems": count})


def _ranking(choice: Any, count: int) -> np.ndarray:
    """Read a ranking as indices, int [count], best first. Raises NoVerdict if it is invalid."""
    ranking = json_field(choice, "ranking")
    whole = isinstance(ranking, list) and all(type(number) is int for number in ranking)
    if not whole or sorted(ranking) != list(range(1, count + 1)):
        raise NoVerdict(f"the judge's ranking of {count} images is {str(ranking)[:60]}")
    return np.array(ranking) - 1


def _better_of_two(choice: Any) -> np.ndarray:
    """Return wins float64 [2, 2] from the probabilities of "1" and "2". Raises NoVerdict."""
    share = expected_value(choice, {"1": 1.0, "2": 0.0}, "1 and 2")
    return np.array([[0.0, share], [1.0 - share, 0.0]])
