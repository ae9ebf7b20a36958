"""Runs that are trained by judges: one rates each image, one compares a prompt's images.

The endpoint fails, answers in prose and requests pauses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
import ray

from cluster.driver.scoring import Scored, Scoring
from records.errors import InputsLost, RunFailed
from tests.cluster.reward_harness import IMAGES, MEAN, PROMPTS, Harness, config
from tests.cluster.runs import run_here, tiny_config
from tests.rewards.judge import judging

COMPARED = {"name": "tests.cluster.scorers:Place", "alias": "place", "per": "prompt"}


def test_a_run_trains_with_vision_language_scorers(tiny_sd3_dir, tmp_path, ray_here):
    """In two iterations each image is rated once and compared twice, both explored and regenerated.

    Temporary failures are retried, and held-out images are rated only.
    """
    with judging() as judge:
        judge.answers = [503, "prose", (429, {"Retry-After": "0"}), 500]
        requested = {"url": judge.url, "model": "judge-7b"}
        rank = {**requested, "size": 3, "rounds": 2}
        scorers = [
            {"name": "vlm", "settings": {**requested, "votes": 1}},
            {"name": "vlm_rank", "per": "prompt", "settings": rank, "weight": 0.5},
        ]
        changes = {"iterations": 2, "rewards__scorers": scorers}
        run = run_here(tiny_config(tiny_sd3_dir, tmp_path, "judged", **changes))
        asked_for = [json.dumps(recorded["messages"]) for recorded in judge.requests]
    lists = [recorded for recorded in asked_for if recorded.count('"type": "image_url"') > 1]
    rows = run.metrics()
    trained = [row for row in rows if row["kind"] == "iteration"]
    assert len(trained) == 2 and all(row["rewards/failed"] == 0 for row in trained)
    for row in trained:
        assert 0 < row["reward/vlm"] < 1 and row["grad_norm"] > 0
        # by symmetry, for the explored and for the regenerated images of a prompt
        assert row["reward/vlm_rank"] == pytest.approx(0.5, abs=1e-4)
        assert row["reward/vlm_rank/consistency"] > 0.8 and row["reward/vlm_rank/tokens"] > 0
    held_out = [row for row in rows if row["kind"] == "evaluation"]
    assert held_out and all("reward/eval/vlm_rank" not in row for row in held_out)
    for row in held_out:
        assert row["reward/eval_mean"] == pytest.approx(row["reward/eval/vlm"])
    # 8 explored images of a prompt are in 3 lists per round, 4 regenerated ones in 2; a list that
    # is drawn twice is requested once
    assert 4 * (3 + 2) < len(lists) <= 2 * 4 * (3 + 2) and len(set(lists)) == len(lists)
    selected = [json.loads(line) for line in run.selections_file.read_text().splitlines()]
    assert [len(row["groups"]) for row in selected] == [2, 2]
    assert (run.path / "report.html").exists()


@pytest.fixture(scope="module")
def compared(ray_here) -> Iterator[Harness]:
    with Harness(config([MEAN, COMPARED])) as harness:
        yield harness


def together(harness: Harness, parts: int = 2) -> tuple[Scored, Scoring]:
    """Score the four images as those of one prompt, in several parts."""
    scoring = Scoring(harness.run.rewards, harness.service)
    images = [ray.put(part) for part in np.array_split(IMAGES, parts)]
    prompts = [[PROMPTS[0]] * (len(IMAGES) // parts)] * parts
    scores = harness.wait(*(scoring.score(n, images[n], prompts[n], (0,)) for n in range(parts)))
    (whole,) = harness.wait(scoring.combine("x", scores, images, PROMPTS[0], (0,)))
    return whole, scoring


def test_all_images_of_a_prompt_are_compared_in_one_call(compared):
    """The result does not depend on the parts in which they came; combined and counted is the
    whole.
    """
    for parts in (1, 2, 4):
        whole, scoring = together(compared, parts)
        assert whole.values["place"].tolist() == [0, 1, 2, 3]
        assert whole.rewards.tolist() == [0, 2, 4, 6]
        assert (scoring.tally.images, scoring.tally.dropped) == (4, 0)
        assert scoring.tally.labels == {"mean", "place"}
    assert scoring.tally.scorer_means()["reward/place"] == 1.5


def test_evaluations_do_not_compare(compared):
    scored, scoring = compared.score(evaluation=True)
    assert scored.rewards.tolist() == [0, 1, 2, 3] and scoring.tally.labels == {"mean"}


def test_images_lost_before_a_comparison_are_generated_again(compared):
    """It is reported as a loss of inputs, not as a failure of the scorer."""
    scoring = Scoring(compared.run.rewards, compared.service)
    (scored,) = compared.wait(scoring.score("x", ray.put(IMAGES), PROMPTS, (0,)))

    async def lost(*_: object) -> None:
        raise InputsLost("an object is gone")

    for pool in compared.service.pools:
        pool.perform = lost
    try:
        with pytest.raises(InputsLost):
            compared.wait(scoring.combine("x", [scored], [ray.put(IMAGES)], PROMPTS[0], (0,)))
    finally:
        for pool in compared.service.pools:
            del pool.perform


def test_random_audit_seeds_are_not_compared_with_selected_ones(tiny_sd3_dir, tmp_path):
    changes = {"rewards__scorers": [MEAN, COMPARED], "audit__random_seeds": 2}
    with pytest.raises(Exception, match="audit.random_seeds: place compares images of a prompt"):
        tiny_config(tiny_sd3_dir, tmp_path, "audited", **changes)


def test_a_scorer_that_fails_to_compare_drops_the_prompt(ray_here):
    broken = {**COMPARED, "settings": {"fails": True}}
    with Harness(config([MEAN, broken])) as harness:
        whole, scoring = together(harness)
        assert np.isnan(whole.rewards).all() and scoring.tally.dropped == 4
        with pytest.raises(RunFailed, match="scoring failed for 4 of 4 images, .*no two alike"):
            scoring.tally.check_share()
