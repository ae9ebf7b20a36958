"""Threads of a learner without a GPU."""

import pytest

from configs.load import load, parse
from planning.layouts.threads import keep_threads, with_threads


@pytest.mark.parametrize(
    ("cores", "changes", "expected", "regenerating"),
    [
        (1, [], 1, 1),
        (2, [], 2, 1),  # two rollout actors explore meanwhile
        (5, [], 4, 3),
        (16, [], 4, 4),  # at most the measured number
        (2, ["arm=diffusionnft"], 2, 2),  # nothing is explored
        (2, ["arm=naive_quant"], 2, 2),  # nothing is regenerated, so the number is unused
        (4, ["services.learner.replicas=2"], 2, 1),
        (8, ["services.learner.replicas=2", "services.rollout.threads=2"], 4, 2),
        (2, ["services.learner.replicas=4"], 1, 1),
        (4, ["explore_ahead=1"], 2, 2),
        (2, ["explore_ahead=1"], 1, 1),
        (8, ["services.learner.threads=1"], 1, 1),  # given by hand
        (2, ["services.learner.regenerate_threads=2"], 2, 2),
        (8, ["services.learner.gpus=0.5"], 1, None),
    ],
)
def test_the_learner_gets_the_cores(cores, changes, expected, regenerating):
    config = with_threads(load("quickstart", changes), cores)
    assert config.services.learner.threads == expected
    assert config.services.learner.regenerate_threads == regenerating


def test_a_resumed_run_keeps_its_threads():
    recorded = with_threads(load("quickstart", []), 3)
    again = keep_threads(load("quickstart", []), recorded)
    assert with_threads(again, 8).services.learner.threads == 3
    by_hand = load("quickstart", ["services.learner.threads=2"])
    assert keep_threads(by_hand, recorded).services.learner.threads == 2
    again = ["services.learner.regenerate_threads=2"]
    assert recorded.services.learner.regenerate_threads == 1
    assert keep_threads(load("quickstart", again), recorded).services.learner.threads == 3
    assert keep_threads(by_hand, recorded).services.learner.regenerate_threads == 1


def test_a_run_recorded_without_regenerate_threads_keeps_its_bits():
    services = {"learner": {"threads": 2}}
    older = parse(load("quickstart").model_dump(mode="json") | {"services": services})
    kept = with_threads(keep_threads(load("quickstart"), older), 2)
    assert kept.services.learner.threads == 2
    assert kept.services.learner.regenerate_threads is None  # as many as for training
