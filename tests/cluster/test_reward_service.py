"""The reward service: scorers that die, hang, return wrong results or are slow; groups of actors;
held-out scorers.

Pools, retries and deadlines are real; images come from the test, so that a case takes a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from actors.calls import Call, Caller, Task
from cluster.driver.scoring import RewardService, Scored, Scoring
from configs.load import ConfigError
from records.errors import InputsLost, RunFailed
from tests.cluster.reward_harness import (
    IMAGES,
    JPEG,
    MEAN,
    PROMPTS,
    Harness,
    config,
    misbehaves,
    rewards_of,
)
from tests.cluster.runs import adapters, run_here, tiny_config

KINDS = ("raises", "nan", "infinite", "short", "text")


@pytest.fixture(scope="module")
def shared(ray_here, tmp_path_factory) -> Iterator[Harness]:
    """Start two actors with all scorers that do not kill; each test uses some of them."""
    marks = tmp_path_factory.mktemp("marks")
    once = misbehaves("once raises", settings={"mark": str(marks / "mark")})
    counts = misbehaves("counts", settings={"mark": str(marks / "log")})
    with Harness(
        config([MEAN, JPEG, once, counts, *(misbehaves(kind) for kind in KINDS)])
    ) as harness:
        yield harness


def test_separate_scorer_actors_do_not_change_scores(shared):
    """Rewards, raw scores and order are the same for shared actors and for a group of one scorer.

    Speed is reported per scorer.
    """
    together, scoring = shared.score(rewards_of(MEAN, JPEG))
    means = scoring.tally.scorer_means()
    assert means["reward/mean"] == 1.5 and "rewards/stood_in" not in means
    assert means["rewards/images_per_s/mean"] > 0
    assert means["rewards/images_per_s/jpeg_compressibility"] > 0
    with Harness(
        config([MEAN, JPEG], {"actors": 1}, own={"jpeg_compressibility": {"actors": 1}})
    ) as harness:
        apart, _ = harness.score()
        assert sum(event.startswith("actor_started") for event in harness.events) == 2
    assert np.array_equal(together.rewards, apart.rewards)
    assert list(apart.values) == list(together.values)
    assert all(
        np.array_equal(apart.values[label], together.values[label]) for label in apart.values
    )


def test_held_out_scorers_score_evaluations_only(shared):
    rewards = rewards_of(MEAN, evaluation_scorers=[JPEG], normalize="zscore")
    trained, _ = shared.score(rewards)
    assert set(trained.values) == {"mean"}
    assert trained.rewards[0] == pytest.approx(-1.5 / np.sqrt(1.25))
    evaluated, _ = shared.score(rewards, evaluation=True)
    assert set(evaluated.values) == {"mean", "jpeg_compressibility"}
    assert evaluated.rewards.tolist() == [0, 1, 2, 3]


def test_a_transient_exception_loses_no_sample(shared):
    scored, scoring = shared.score(rewards_of(misbehaves("once raises")))
    assert scored.rewards.tolist() == [0, 1, 2, 3] and scoring.tally.dropped == 0
    assert any("chunk_reissued" in event and "out of paint" in event for event in shared.events)
    scoring.tally.check_share()


@pytest.mark.parametrize(
    ("kind", "dropped", "why"),
    [
        ("raises", 4, "scorer 'raises' raised RuntimeError: out of paint"),
        ("nan", 4, "returned nan for image 0 of 4"),
        ("infinite", 1, "returned inf for image 3 of 4"),
        ("short", 4, r"returned shape \[3\] for 4 images"),
        ("text", 4, "not an array of numbers"),
    ],
)
def test_permanent_failures_are_dropped_and_counted_and_never_zero(shared, kind, dropped, why):
    before = len(shared.events)
    scored, scoring = shared.score(rewards_of(MEAN, misbehaves(kind), max_failed_share=0.2))
    lost = np.isnan(scored.rewards)
    assert lost.sum() == dropped == scoring.tally.dropped and scoring.tally.images == 4
    # the scores of the working scorer are kept
    assert scored.values["mean"].tolist() == [0, 1, 2, 3]
    assert sum("chunk_reissued" in event for event in shared.events[before:]) == 1
    with pytest.raises(
        RunFailed,
        match=f"scoring failed for {dropped} of 4 images, .*max_failed_share = 0.2.*{why}",
    ):
        scoring.tally.check_share()


def test_failures_up_to_max_failed_share_are_allowed(shared):
    _, scoring = shared.score(rewards_of(misbehaves("infinite"), max_failed_share=0.25))
    scoring.tally.check_share()


def test_a_failed_optional_scorer_is_replaced_by_the_group_mean(shared):
    scored, scoring = shared.score(
        rewards_of(MEAN, misbehaves("infinite", required=False), max_failed_share=0.0)
    )
    # its scores are 0, 1, 2 and a failure, which gets their mean, 1
    assert scored.rewards.tolist() == [0, 2, 4, 4] and np.isnan(scored.values["infinite"][3])
    assert scoring.tally.dropped == 0 and scoring.tally.scorer_means()["rewards/stood_in"] == 1
    scoring.tally.check_share()


def test_a_pool_is_normalized_as_a_whole(shared):
    """The scores of two chunks of one prompt's pool are normalized by the z-score over both."""
    scoring = Scoring(rewards_of(MEAN, normalize="zscore"), shared.service)
    halves = [
        scoring.score(part, ray.put(IMAGES[part * 2 : part * 2 + 2]), PROMPTS[:2], (0,))
        for part in (0, 1)
    ]
    parts = shared.wait(*halves)
    assert parts[0].rewards.tolist() == parts[1].rewards.tolist() == [-1, 1]
    whole = Scored.concatenate(parts)
    assert np.allclose(whole.rewards, (np.arange(4) - 1.5) / np.sqrt(1.25))
    assert whole.values["mean"].tolist() == [0, 1, 2, 3]


def test_evaluations_are_scored_once_by_content(ray_here, tmp_path):
    log = tmp_path / "log"
    with Harness(
        config([misbehaves("counts", settings={"mark": str(log)})], {"actors": 1})
    ) as harness:
        (first, scoring) = harness.score(evaluation=True)
        (second, again) = harness.score(evaluation=True)
        assert np.array_equal(first.rewards, second.rewards) and log.read_text() == "4\n"
        # cached scores count as no work
        assert scoring.tally.speeds()["rewards/images_per_s/counts"] > 0
        assert again.tally.speeds() == {}
        harness.score()
        harness.score()
        assert log.read_text() == "4\n4\n4\n"  # in training nothing is cached


@pytest.mark.parametrize("kind", ["once dies", "once hangs"])
def test_batches_of_killed_and_hanging_scorers_are_scored_elsewhere(ray_here, tmp_path, kind):
    """After SIGKILL during a batch, or silence beyond the deadline, the actor is replaced and
    another one scores.
    """
    with Harness(config([misbehaves(kind, settings={"mark": str(tmp_path / "mark")})])) as harness:
        scored, scoring = harness.score()
        assert scored.rewards.tolist() == [0, 1, 2, 3] and scoring.tally.dropped == 0
        died = [event for event in harness.events if event.startswith("actor_died")]
        assert len(died) == 1 and ("no answer for 2 s" in died[0]) == (kind == "once hangs")


@pytest.mark.parametrize("kind", ["dies", "hangs"])
def test_a_batch_that_kills_every_actor_is_dropped_and_counted(ray_here, kind):
    """The bad scorer has actors of its own, so that only its own scores are lost."""
    # a death may be noticed later than after 2 s on a busy machine
    own = {"bad": {"deadline_s": 2.0 if kind == "hangs" else 60.0}}
    run = config([MEAN, misbehaves(kind, "bad")], {"actors": 1}, own=own, max_failed_share=0.5)
    with Harness(run) as harness:
        scored, scoring = harness.score()
        assert scored.values["mean"].tolist() == [0, 1, 2, 3]
        assert np.isnan(scored.rewards).all()
        assert scoring.tally.dropped == 4
        assert sum(event.startswith("actor_died") for event in harness.events) == 2
    why = "no answer for 2 s" if kind == "hangs" else "died"
    with pytest.raises(
        RunFailed, match=rf"4 of 4 images, .* last: scorers.bad: .*failed 2 times.*{why}"
    ):
        scoring.tally.check_share()


def test_losing_all_actors_of_a_reward_service_ends_the_run(ray_here):
    run = config([misbehaves("dies")], {"actors": 1, "max_restarts": 0, "max_attempts": 9})
    with Harness(run) as harness, pytest.raises(RunFailed, match="no reward actor is left"):
        harness.score()


def test_lost_images_do_not_count_as_scorer_failures():
    class Gone(Caller):
        alive = 1

        async def perform(self, task: Task[Any], call: Call) -> Any:
            raise InputsLost("the node went")

    scoring = Scoring(rewards_of(MEAN), RewardService({"reward": (Gone(), ("mean",))}))  # type: ignore[dict-item]
    with pytest.raises(InputsLost):
        asyncio.run(scoring.score("x", None, PROMPTS, (0,)))
    assert scoring.tally.images == scoring.tally.dropped == 0


def test_unknown_groups_are_refused():
    with pytest.raises(
        ConfigError, match="services.scorers.hpsv2: unknown scorer; available: mean"
    ):
        config([MEAN], own={"hpsv2": {}})


def test_a_separate_scorer_group_gives_the_same_bits_in_a_run(
    ray_here, undisturbed, tiny_sd3_dir, tmp_path
):
    """One scorer has actors of its own, and a held-out scorer adds a column."""
    run = run_here(
        tiny_config(
            tiny_sd3_dir,
            tmp_path,
            "evaluated",
            rewards__evaluation_scorers=[{"name": "jpeg_incompressibility"}],
            services__scorers={"jpeg_compressibility": {"cpus": 0.1}},
        )
    )
    assert adapters(run, 3) == adapters(undisturbed, 3)
    rows = run.metrics()
    for row in (row for row in rows if row["kind"] == "evaluation"):
        assert row["reward/eval/jpeg_incompressibility"] == pytest.approx(
            -row["reward/eval/jpeg_compressibility"]
        )
        assert row["reward/eval_mean"] == pytest.approx(row["reward/eval/jpeg_compressibility"])
        assert row["rewards/images_per_s/jpeg_incompressibility"] > 0
    last = [row for row in rows if row["kind"] == "iteration"][-1]
    assert "reward/jpeg_incompressibility" not in last
    assert last["rewards/images_per_s/jpeg_compressibility"] > 0
    started = [event["kind"] for event in run.events() if event["event"] == "actor_started"]
    assert started.count("scorers.jpeg_compressibility") == 1 and started.count("reward") == 1
