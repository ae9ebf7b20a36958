"""Layouts whose weights leave a GPU between turns: when they are tried, their bytes and seconds."""

from dataclasses import replace

import pytest

from configs.load import ConfigError
from configs.resume import differences
from planning.layouts.choose import choose
from planning.layouts.costs import Costs, Parts
from planning.layouts.gpus import Gpus, assign_gpus
from planning.layouts.predict import Tasks, predict
from planning.layouts.spec import Group, LayoutSpec, with_layout
from tests.planning.made_up import GB, MODELS, SHARDS, costs, preset


def turning(model: str = "flux1") -> Costs:
    """Return costs: 10 of the rollout actor's 16 GB may leave, and 24 of the learner's 34, at 50
    GB/s.

    5 and 6 GB are those of passes.
    """
    move = {"rollout": 0.2, "learner": 0.48}
    parts = {"rollout": Parts(10 * GB, 5 * GB), "learner": Parts(24 * GB, 6 * GB)}
    there = {kind: replace(each, move=move) for kind, each in costs(model).tasks.items()}
    return replace(costs(model), tasks=there, parts={"B200": parts})


@pytest.mark.parametrize(
    ("memory", "leaves", "held", "moved"),
    [
        (68, (), 68, 0.0),  # 34 + 16 + 4 + 10, and 1 for each of four processes
        # the learner has no passes during the rollout actors' turn
        (64, ("rollout",), 68 - 6, 2 * 0.2),
        (60, ("rollout", "learner"), 68 - 10 - 5, 2 * (0.2 + 0.48)),  # the larger: the learner's
        (53, ("rollout", "learner"), 68 - 10 - 5, 2 * (0.2 + 0.48)),
    ],
)
def test_if_two_models_do_not_fit_the_cheaper_one_moves(memory, leaves, held, moved):
    best = choose(preset("flux1"), [Gpus("B200", 1, memory)], turning()).best
    assert best.numbers.leaves == leaves and best.gb == pytest.approx(held)
    assert best.seconds == pytest.approx(sum(MODELS["flux1"]) + moved)
    services = with_layout(preset("flux1"), best.numbers).services
    given = {"rollout": services.rollout.between_turns, "learner": services.learner.between_turns}
    assert {kind for kind, where in given.items() if where == "host"} == set(leaves)
    assert services.takes_turns == bool(leaves)


def test_turns_are_used_only_if_needed_and_faster():
    roomy = choose(preset("flux1"), [Gpus("B200", 4, 69)], turning())
    assert not any(each.numbers.leaves for each in roomy.table)
    tight = choose(preset("flux1"), [Gpus("B200", 4, 60)], turning())
    assert tight.best.numbers.leaves
    assert tight.why == (
        "the fastest by prediction; rollout actors and the learner's frozen weights move to host"
        " memory between turns, because both do not fit on one GPU"
    )
    split = next(each for each in tight.table if each.numbers.mode == "split")
    assert split.seconds == pytest.approx(1140 / 3) and split.seconds > tight.best.seconds
    slow = {"B200": replace(turning().tasks["B200"], move={"rollout": 300.0, "learner": 300.0})}
    waits = choose(preset("flux1"), [Gpus("B200", 4, 60)], replace(turning(), tasks=slow))
    assert waits.best.numbers.mode == "split" and not waits.best.numbers.leaves


def test_text_encoders_stay_and_encode_once_is_suggested():
    for memory, hint in ((50, True), (43, True), (41, False)):
        with pytest.raises(ConfigError) as error:
            choose(preset("flux1"), [Gpus("B200", 1, memory)], turning())
        message = f"{53 - memory:.1f} GB short; it fits with prompts.encode_once = true; nearest"
        assert (message in error.value.lines[0]) == hint
    once = replace(turning(), encoder_leaves=True)
    best = choose(preset("flux1"), [Gpus("B200", 1, 43)], once).best
    assert best.numbers.leaves and best.gb == pytest.approx(53 - 11)


def test_with_turns_regeneration_follows_exploring():
    """With the learners of three prompts on two of three GPUs and four rollout actors, exploring
    ends first.
    """
    groups = {"learner": Group(2, 0.52), "rollout": Group(4, 0.36)}
    there = {"B200": Tasks(12, 4, 1.0, 10.0, 20.0, move={"rollout": 0.5})}
    numbers = LayoutSpec("shared", groups, leaves=("rollout",))
    laid = assign_gpus(numbers, [Gpus("B200", 3, 180)]) or []
    assert max(each.actors.get("rollout", 0) for each in laid) == 2
    found = predict(numbers, laid, there)
    # two rollout actors on a GPU are as fast as one; both leave: one second per change
    assert found.iteration == pytest.approx(found.explore + 1.0 + 20.0 + 40.0 + 1.0)


@pytest.mark.parametrize(("host", "fits"), [(None, True), (34.0, True), (33.9, False)])
def test_known_host_memory_limits_turns(host, fits):
    gpus = [Gpus("B200", 1, 60, host_gb=host)]
    if fits:
        assert choose(preset("flux1"), gpus, turning()).best.numbers.leaves
        return
    with pytest.raises(ConfigError) as error:
        choose(preset("flux1"), gpus, turning())
    assert (
        "with rollout and learner between turns: 34.0 GB of host memory per B200, but a node has"
        " 33.9 GB for each; nearest layout that fits:" in error.value.lines[0]
    )


def test_between_turns_can_be_set_explicitly():
    gpus, key = [Gpus("B200", 1, 180)], "services.{}.between_turns={}"
    by_hand = choose(preset("flux1", key.format("learner", "host")), gpus, turning()).best
    assert by_hand.numbers.leaves == ("learner",)
    stays = preset("flux1", key.format("rollout", "stay"))
    best = choose(stays, [Gpus("B200", 1, 64)], turning()).best
    assert best.numbers.leaves == ("learner",) and best.gb == 68 - 5
    with pytest.raises(ConfigError, match="3.0 GB short"):
        choose(stays, [Gpus("B200", 1, 60)], turning())
    shards = preset("flux1", *SHARDS)
    leaves = {
        each.numbers.leaves for each in choose(shards, [Gpus("B200", 4, 63)], turning()).table
    }
    assert leaves == {(), ("rollout",)}  # shards stay on their GPUs
    ahead = choose(preset("flux1", "explore_ahead=1"), [Gpus("B200", 4, 60)], turning())
    assert not any(each.numbers.leaves for each in ahead.table)


def test_between_turns_may_change_at_a_resume():
    config = preset("flux1")
    stayed, left = (
        with_layout(config, choose(config, [Gpus("B200", 1, memory)], turning()).best.numbers)
        for memory in (68, 60)
    )
    assert stayed.services.takes_turns != left.services.takes_turns
    assert differences(stayed, left) == []
