"""Silent failures on the driver's side: scorers that answer for something else, and repeated seeds.

Each is injected into a run of the product's own actors, and ends it with one line.
"""

from typing import Any

import numpy as np
import pytest

import tests.cluster.local as local
from actors.messages import Scores
from actors.reward import RewardActor
from cluster.driver.exploration import Exploration, SeedLedger
from cluster.driver.score_tally import ConstantScores, ScoreTally
from cluster.driver.scoring import TOLERANCE, disagreement
from configs.rewards import Rewards
from records.errors import RunFailed
from rewards.base import ScorerError
from rewards.combine import Combination, WeightedScorer
from tests.cluster.local import play
from tests.cluster.runs import tiny_config


class Wrapped:
    """The real scorer, whose answers are changed on the way."""

    def __init__(self, scorer: Any):
        self.scorer, self.before = scorer, None

    def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
        return self.spoil(self.scorer(images, prompts, metadata))

    def spoil(self, scores: Any) -> Any:
        return scores


class OtherImages(Wrapped):
    """Each image gets the score of its neighbor."""

    def spoil(self, scores: Any) -> Any:
        return np.roll(scores, 1)


class OtherOrder(Wrapped):
    """Scores are sorted, as from a server that answers in the order of completion."""

    def spoil(self, scores: Any) -> Any:
        return np.sort(scores)


class LastBatch(Wrapped):
    """Scores of the batch before, as many as there are images, so that their number is right."""

    def spoil(self, scores: Any) -> Any:
        before, self.before = self.before, scores
        return scores if before is None else np.resize(before, scores.shape)


class FirstImageForAll(Wrapped):
    def spoil(self, scores: Any) -> Any:
        return np.full_like(scores, scores[0])


class Constant(Wrapped):
    def spoil(self, scores: Any) -> Any:
        return np.full_like(scores, 0.25)


def spoiled(monkeypatch: Any, kind: type[Wrapped]) -> None:
    class Spoiled(RewardActor):
        def __init__(self, *args: Any):
            super().__init__(*args)
            scorers = self._scorer.scorers
            self._scorer.scorers = {label: kind(scorer) for label, scorer in scorers.items()}

    monkeypatch.setattr(local, "RewardActor", Spoiled)


def config_of(model: Any, root: Any, **changes: Any) -> Any:
    every = {"explore__chunk_size": 8, "audit__identity_every": 1}
    return tiny_config(model, root, "silent", **{**every, **changes})


@pytest.mark.parametrize("kind", [OtherImages, OtherOrder, LastBatch, FirstImageForAll])
def test_a_scorer_that_scores_other_images_ends_the_run(kind, tiny_sd3_dir, tmp_path, monkeypatch):
    spoiled(monkeypatch, kind)
    with pytest.raises(
        RunFailed,
        match="scorer 'jpeg_compressibility' gave the same 8 images different scores when they"
        " were scored again in reverse order: up to .* standard deviations apart",
    ):
        # by the second check at the latest: before the first one an actor may have had no batch
        play(config_of(tiny_sd3_dir, tmp_path), tmp_path, stop=2)


def test_a_correct_scorer_passes_the_check(tiny_sd3_dir, tmp_path, monkeypatch):
    played = play(config_of(tiny_sd3_dir, tmp_path), tmp_path, stop=1)
    assert played.rows[0]["audit/scorer_error"] == 0.0


def test_a_scorer_may_be_declared_random(tiny_sd3_dir, tmp_path, monkeypatch):
    spoiled(monkeypatch, OtherOrder)
    config = config_of(tiny_sd3_dir, tmp_path, rewards__deterministic=False)
    assert "audit/scorer_error" not in play(config, tmp_path, stop=1).rows[0]


def test_a_constant_scorer_is_reported_and_ends_the_run(tiny_sd3_dir, tmp_path, monkeypatch):
    spoiled(monkeypatch, Constant)
    with pytest.raises(
        RunFailed, match="iteration 2: every scorer gave every image the same score, 3 iterations"
    ):
        play(config_of(tiny_sd3_dir, tmp_path), tmp_path, stop=3)


def test_constant_scores_are_counted_over_consecutive_iterations():
    events: list[Any] = []
    notes: list[str] = []
    watch = ConstantScores(lambda name, **fields: events.append((name, fields)), notes.append)

    def tally(*values: float) -> ScoreTally:
        made = ScoreTally(Combination.from_config(rewards), {"jpeg_compressibility"}, 1.0)
        made.answered(
            [Scores({"jpeg_compressibility": np.array(part)}) for part in (values[:1], values[1:])]
        )
        return made

    rewards = Rewards.model_validate({"scorers": [{"name": "jpeg_compressibility"}]})
    same, other, few = tally(*[0.5] * 4), tally(0.5, 0.5, 0.5, 0.6), tally(*[0.5] * 3)
    for iteration, one in enumerate([same, same, other, same, few, same, same]):
        watch.observe(iteration, one)
    with pytest.raises(RunFailed, match="iteration 7"):
        watch.observe(7, same)
    assert [fields["iteration"] for _, fields in events] == [0, 1, 3, 5, 6, 7]
    assert notes[0] == (
        "iteration 0: scorer 'jpeg_compressibility' gave 0.5 for every image, so it does not rank"
        " them"
    )


def test_disagreement_of_known_scores():
    a = np.array([1, 2, 3, 4], np.float32)
    assert disagreement(a, a) == 0.0
    assert disagreement(a, a[::-1]) == pytest.approx(3 / np.sqrt(1.25))
    assert disagreement(a, np.full(4, np.nan, np.float32)) == 0.0
    assert disagreement(np.full(4, 2, np.float32), np.full(4, 2.002, np.float32)) == pytest.approx(
        1.0, rel=1e-3
    )
    for size in (2, 3, 8, 24):  # the smallest effect of a swap of two neighbors in rank
        ranks = np.arange(size, dtype=np.float32)
        assert disagreement(ranks, ranks[::-1]) > TOLERANCE


def test_repeated_seeds_end_the_run(tiny_sd3_dir, tmp_path, monkeypatch):
    honest = Exploration.seeds
    monkeypatch.setattr(
        Exploration, "seeds", lambda self, iteration, p, count: honest(self, 0, p, count)
    )
    with pytest.raises(RunFailed, match="iteration 1, prompt 0, repeat those of iteration 0"):
        play(config_of(tiny_sd3_dir, tmp_path), tmp_path, stop=2)


def test_the_seed_ledger_allows_a_repeated_iteration():
    ledger = SeedLedger()
    ledger.add((0, 0), (1, 2))
    ledger.add((0, 0), (1, 2))
    with pytest.raises(RunFailed, match="iteration 0, prompt 1, repeat those of iteration 0"):
        ledger.add((0, 1), (1, 3))
    with pytest.raises(RunFailed, match="prompt 2, repeat within itself"):
        ledger.add((0, 2), (5, 5))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda images: "fine", "returned str, which is not an array of numbers"),
        (lambda images: np.zeros(len(images) + 1), "returned shape [9] for 8 images"),
        (lambda images: np.full(len(images), np.inf), "returned inf for image 0 of 8"),
        (lambda images: [10**400] * len(images), "returned list, which is not an array of numbers"),
        (lambda images: None, "returned shape [] for 8 images"),
    ],
)
def test_an_invalid_answer_is_never_a_reward(answer, message):
    scorer = WeightedScorer({"odd": lambda images, prompts, metadata: answer(images)}, {"odd": 1.0})
    images = np.zeros((8, 3, 4, 4), np.uint8)
    made = scorer.attempt(images, [""] * 8, [{}] * 8)
    assert np.isnan(made.scores["odd"]).all()
    with pytest.raises(ScorerError):
        scorer(images, [""] * 8, [{}] * 8)
    assert message in made.failures[0]
