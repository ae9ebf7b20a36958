"""Threads of a learner without a GPU."""

import pytest

from configs.load import load
from planning.layouts.threads import keep_threads, with_threads


@pytest.mark.parametrize(
    ("cores", "changes", "wanted"),
    [
        (1, [], 1),
        (2, [], 2),
        (16, [], 4),  # no more than were measured
        (4, ["services.learner.replicas=2"], 2),
        (2, ["services.learner.replicas=4"], 1),
        (4, ["explore_ahead=1"], 2),  # two rollout actors work meanwhile
        (2, ["explore_ahead=1"], 1),
        (8, ["services.learner.threads=1"], 1),  # by hand
        (8, ["services.learner.gpus=0.5"], 1),
    ],
)
def test_the_learner_gets_the_cores(cores, changes, wanted):
    config = with_threads(load("quickstart", changes), cores)
    assert config.services.learner.threads == wanted
    assert config.services.rollout.threads == 1


def test_a_run_that_goes_on_keeps_its_threads():
    recorded = with_threads(load("quickstart", []), 3)
    again = keep_threads(load("quickstart", []), recorded)
    assert with_threads(again, 8).services.learner.threads == 3
    by_hand = load("quickstart", ["services.learner.threads=2"])
    assert keep_threads(by_hand, recorded).services.learner.threads == 2
