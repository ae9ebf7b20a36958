"""A scorer's server that cannot be reached for a while: scoring waits, and no image is dropped."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from actors.calls import Task
from actors.messages import Scores
from cluster.driver import scorer_outages
from cluster.driver.scorer_outages import ScorerOutages
from cluster.driver.scoring import RewardService, Scored, Scoring
from cluster.driver.services import ActorServices
from configs.prompts import Prompt
from records.errors import RunFailed
from records.rundir import RunDirectory
from tests.cluster.reward_harness import JPEG, MEAN, Harness, config, misbehaves, rewards_of

LINE = "scorer 'mean' raised ScorerUnreachable: http://judge/ did not answer"
NAN = np.array([np.nan, np.nan], np.float32)
LOST = Scores({"mean": NAN, "jpeg_compressibility": NAN + 1}, (LINE,), {"mean": LINE})
GOOD = Scores({"mean": np.array([1, 2], np.float32), "jpeg_compressibility": np.ones(2, "f")})


class Pool:
    """Gives the answers one after the other, and retries like a pool whatever is a fault."""

    alive = 1

    def __init__(self, *answers: Scores):
        self.answers, self.faults = list(answers), list[str]()

    async def call(self, task: Task[Any], method: Any, *args: Any) -> Scores:
        while why := task.accept(answer := self.answers.pop(0)):
            self.faults.append(why)
            if len(self.faults) == 3:
                break
        return answer


class Outage:
    """The scoring of two images by ``pool``, with ``limit_s`` for outages."""

    def __init__(self, limit_s: float, *answers: Scores, **of_scorer: Any):
        self.events: list[tuple[str, dict[str, Any]]] = []
        record = lambda name, **fields: self.events.append((name, fields))  # noqa: E731
        outages = ScorerOutages(limit_s, record) if limit_s else None
        self.pool: Any = Pool(*answers)
        groups = {"reward": (self.pool, ("mean", "jpeg_compressibility"))}
        rewards = rewards_of(MEAN | of_scorer, JPEG, max_failed_share=0.5)
        self.scoring = Scoring(rewards, RewardService(groups, None, outages))

    def score(self) -> Scored:
        prompts, images = [Prompt("a"), Prompt("b")], cast(Any, "images")
        return asyncio.run(self.scoring.score("x", images, prompts, ()))


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """The pauses of the driver, which take no time; the clock moves by them."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(scorer_outages.asyncio, "sleep", sleep)
    monkeypatch.setattr(scorer_outages.time, "monotonic", lambda: 100.0 + sum(slept))
    return slept


def test_a_batch_waits_for_its_scorer(pauses):
    """It is not given to other actors meanwhile, and its lost answers are not counted."""
    outage = Outage(600.0, LOST, LOST, GOOD)
    assert outage.score().values["mean"].tolist() == [1, 2]
    assert pauses == [5.0, 5.0] and outage.pool.faults == []
    assert outage.scoring.tally.dropped == 0
    assert outage.events == [
        ("scorer_unreachable", {"scorer": "mean", "why": LINE, "limit_s": 600.0}),
        ("scorer_reached", {"scorer": "mean", "seconds": 10.0}),
    ]


def test_a_run_ends_after_too_long_an_outage(pauses):
    outage = Outage(12.0, *[LOST] * 9)
    with pytest.raises(RunFailed, match=r"did not answer; it could not be reached for 12 s \(rew"):
        outage.score()
    assert pauses == [5.0, 5.0, 2.0]


def test_a_later_outage_has_its_own_time(pauses):
    outage = Outage(12.0, LOST, LOST, GOOD, LOST, LOST, GOOD)
    outage.score()
    outage.score()
    assert [name for name, _ in outage.events] == ["scorer_unreachable", "scorer_reached"] * 2


def test_an_outage_ends_with_a_score(pauses):
    """The death of an actor that took the batch says nothing about the server."""
    died = Scores(LOST.values, ())
    outage = Outage(600.0, LOST, died, LOST, GOOD)
    outage.score()
    assert [name for name, _ in outage.events] == ["scorer_unreachable"]
    outage.score()
    assert [name for name, _ in outage.events] == ["scorer_unreachable", "scorer_reached"]


def test_another_failure_of_the_same_answer_is_retried_at_once(pauses):
    other = "scorer 'jpeg_compressibility' raised KeyError: 'x'"
    both = Scores(LOST.values, (LINE, other), {"mean": LINE})
    outage = Outage(600.0, both, LOST, GOOD)
    outage.score()
    assert outage.pool.faults == [other] and pauses == [5.0]


@pytest.mark.parametrize(("limit_s", "more"), [(0.0, {}), (600.0, {"required": False})])
def test_images_fail_as_before_without_a_limit_or_a_need(limit_s, more, pauses):
    outage = Outage(limit_s, *[LOST] * 3, **more)
    assert np.isnan(outage.score().values["mean"]).all()
    assert outage.pool.faults == [LINE] * 3 and pauses == [] and outage.events == []


def test_actors_tell_which_scorer_cannot_be_reached(ray_here):
    with Harness(config([MEAN, misbehaves("unreachable")])) as harness:
        _, scoring = harness.score()
        assert scoring.tally.dropped == 4
        (pool, labels) = harness.service.groups["reward"]
        events: list[str] = []
        outages = ScorerOutages(0.01, lambda name, **_: events.append(name))
        harness.service = RewardService({"reward": (pool, labels)}, None, outages)
        with pytest.raises(RunFailed, match=r"'unreachable' raised ScorerUnreachable: .* 0.01 s"):
            harness.score()
        with pytest.raises(RunFailed, match="'unreachable' raised ScorerUnreachable"):
            harness.score(evaluation=True)  # by the actors' cache
        assert events == ["scorer_unreachable"]


@pytest.mark.parametrize("limit", [0.0, 30.0])
def test_a_run_waits_as_long_as_its_configuration_says(limit, tmp_path):
    run = config([MEAN], outage_s=limit).model_copy(update={"run_root": str(tmp_path)})
    services = ActorServices(run, RunDirectory.of(run), lambda *_, **__: None)
    assert (services.reward.outages is not None) == bool(limit)
