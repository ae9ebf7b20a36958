"""The driver's work for a batch of scores, counted: there are thousands of batches per
iteration.
"""

import asyncio
from typing import Any

import numpy as np

from actors.calls import Task
from actors.messages import Scores
from cluster.driver.scoring import RewardService, Scoring
from configs.load import load
from configs.prompts import Prompt
from rewards.combine import Combination


def test_a_prompt_is_sent_once_per_batch_of_its_images(monkeypatch):
    requested: list[str] = []

    def recorded(prompt: Prompt, model: object) -> dict[str, object]:
        requested.append(prompt.text)
        return {"of": prompt.text}

    monkeypatch.setattr(Prompt, "scorer_metadata", recorded)
    a, b = Prompt("a"), Prompt("b")
    texts, metadata = RewardService({}, load("quickstart", []).model).scorer_inputs(
        [a] * 24 + [b, a]
    )
    assert texts == ["a"] * 24 + ["b", "a"] and requested == ["a", "b"]
    assert [row["of"] for row in metadata] == texts


def test_parts_of_a_prompt_are_combined_once(monkeypatch):
    """Each of six chunks has an image without a score, which counts as dropped."""
    combined, real = [], Combination.__call__

    def counted(self: Combination, scores: Any) -> np.ndarray:
        combined.append(len(next(iter(scores.values()))))
        return real(self, scores)

    class Pool:
        alive = 1

        async def call(self, task: Task[Any], method: Any, *args: Any) -> Scores:
            return Scores({label: np.array([1, 2, np.nan], np.float32) for label in args[3]})

    monkeypatch.setattr(Combination, "__call__", counted)
    config = load("quickstart", [])
    pool: Any = Pool()
    service = RewardService({"reward": (pool, config.scorers_of("reward"))})
    scoring, prompt = Scoring(config.rewards, service), Prompt("a")

    async def score() -> np.ndarray:
        parts = [await scoring.score(n, "images", [prompt] * 3, ()) for n in range(6)]
        return (await scoring.combine("all", parts, [], prompt, ())).rewards

    rewards = asyncio.run(score())
    assert combined == [18] and (scoring.tally.images, scoring.tally.dropped) == (18, 6)
    assert np.isnan(rewards).tolist() == [False, False, True] * 6
