"""Placement as a function of configuration and nodes.

Invariants: every actor gets what it needs, no node gives more than it has, no share crosses a GPU,
labels match; actors without a place are named, with what is free.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.load import ConfigError, load
from configs.schema import RunConfig
from planning.placement import (
    ACCELERATOR,
    LargerFirst,
    Need,
    Node,
    NoRoom,
    check_placement,
    fits,
    matches,
    place,
)
from planning.placer import SETTLED_S, Placer

B200, H200 = {ACCELERATOR: "B200"}, {ACCELERATOR: "H200"}


def config(**services: dict[str, Any]) -> RunConfig:
    """Return the shipped preset with other services."""
    given = [
        f"services.{kind}.{key}={value!r}"
        for kind, table in services.items()
        for key, value in table.items()
    ]
    return load("quickstart", given)


def homes(chosen: dict[str, str], kind: str) -> list[str]:
    return [node for actor, node in sorted(chosen.items()) if actor.startswith(kind)]


def everything(run: RunConfig, nodes: list[Node]) -> dict[str, str]:
    placer = Placer(run)
    placer.refresh(nodes)
    placer.place_all(("rollout", "reward", "encoder", "selector", "learner"))
    return {
        actor: placer.take(actor)
        for actor in ("rollout-0", "rollout-1", "reward-0", "encoder-0", "selector-0", "learner-0")
    }


@pytest.mark.parametrize(
    ("selector", "labels", "expected"),
    [
        ({}, {}, True),
        ({"zone": "a"}, {"zone": "a"}, True),
        ({"zone": "a"}, {}, False),
        ({"zone": "!a"}, {}, True),
        ({"zone": "!a"}, {"zone": "a"}, False),
        ({"zone": "in(a, b)"}, {"zone": "b"}, True),
        ({"zone": "in(a,b)"}, {"zone": "c"}, False),
        ({"zone": "!in(a,b)"}, {"zone": "c"}, True),
        ({"zone": "!in(a,b)"}, {"zone": "b"}, False),
        ({"zone": "a", "disk": "fast"}, {"zone": "a"}, False),
    ],
)
def test_labels_are_matched_in_rays_syntax(selector, labels, expected):
    assert matches(labels, selector) is expected


def test_rollout_actors_get_their_accelerator_and_the_learner_the_rest():
    nodes = [Node("b", 8, 2, B200), Node("h", 8, 1, H200)]
    run = config(rollout={"actors": 2, "gpus": 1, "accelerator": "B200"}, learner={"gpus": 1})
    chosen = everything(run, nodes)
    assert homes(chosen, "rollout") == ["b", "b"] and homes(chosen, "learner") == ["h"]


def test_actors_with_fewest_options_are_placed_first():
    """A learner without labels must not take the only GPU that rollout actors may use.

    It requests as much as they do.
    """
    needs = [Need("learner-0", 1, 1), Need("rollout-0", 1, 1, B200)]
    assert place(needs, [Node("b", 4, 1, B200), Node("h", 4, 1, H200)]) == {
        "learner-0": "h",
        "rollout-0": "b",
    }


@pytest.mark.parametrize(
    ("strategy", "expected"), [("spread", ["x", "y", "x", "y"]), ("pack", ["x", "x", "x", "x"])]
)
def test_spread_and_pack(strategy, expected):
    needs = [Need(f"rollout-{i}", 0.5, 0.5, spread=strategy == "spread") for i in range(4)]
    assert sorted(place(needs, [Node("x", 4, 2), Node("y", 4, 2)]).values()) == sorted(expected)


def test_spreading_yields_if_an_actor_could_not_be_placed():
    """Spreading alone would put a small share on each node, so that no node had two GPUs free for
    the last actor.
    """
    needs = [
        Need("rollout-0", 1, 1, spread=True),
        Need("rollout-1", 1, 1, spread=True),
        Need("learner-0", 1, 2),
    ]
    nodes = [Node("x", 8, 2), Node("y", 8, 2)]
    chosen = place(needs, nodes)
    assert chosen["rollout-0"] == chosen["rollout-1"] != chosen["learner-0"]


def test_actors_without_a_gpu_share_avoid_gpu_nodes():
    assert place([Need("reward-0", 1)], [Node("gpu", 1, 8), Node("plain", 1)]) == {
        "reward-0": "plain"
    }


def test_fractional_shares_never_span_gpus():
    assert fits(
        Node("n", 8, 2),
        [Need("a-0", 0, 0.7), Need("b-0", 0, 0.3), Need("a-1", 0, 0.7), Need("b-1", 0, 0.3)],
    )
    # 2.0 in total
    assert not fits(
        Node("n", 8, 2), [Need("a-0", 0, 0.7), Need("a-1", 0, 0.7), Need("a-2", 0, 0.6)]
    )
    assert not fits(Node("n", 8, 1.5), [Need("a-0", 0, 0.75), Need("a-1", 0, 0.75)])
    # tenths add up to a whole
    assert fits(Node("n", 8, 3), [Need("a-0", 0, 2), Need("b-0", 0, 0.1), Need("b-1", 0, 0.9)])


def test_missing_and_existing_resources_are_reported():
    run = config(rollout={"actors": 8, "gpus": 1, "accelerator": "B200"}, reward={"cpus": 64})
    nodes = [Node("b", 16, 4, B200), Node("h1", 16, 8, H200), Node("h2", 16, 8, H200)]
    with pytest.raises(ConfigError) as error:
        check_placement(run, nodes)
    rollout, reward = sorted(error.value.lines, reverse=True)
    assert rollout.startswith(
        "services.rollout: 4 of 8 actors cannot be placed: each needs 0.5 CPU and 1 GPU on a node"
        " with "
    )
    assert f"{ACCELERATOR}=B200" in rollout
    assert f"2 x (16 CPU, 8 GPU, {ACCELERATOR}=H200)" in rollout
    assert reward.startswith("services.reward: 1 of 1 actors cannot be placed: each needs 64 CPU;")


def test_what_is_free_is_without_the_shares_of_actors_that_have_a_place():
    """Of four GPUs with a learner and a rollout actor each, 0.12 of each is left."""
    node = Node("n", 48, 4, B200)
    kinds = {"learner": Need("", 4, 0.52), "rollout": Need("", 2, 0.36)}
    held = {
        f"{kind}-{i}": (replace(need, actor=f"{kind}-{i}"), "n")
        for kind, need in kinds.items()
        for i in range(4)
    }
    spare, other = Node("spare", 1), {"learner-9": (Need("learner-9", 9, 9), "elsewhere")}
    with pytest.raises(NoRoom) as error:
        place([Need("learner-4", 4, 0.52)], [node, spare], held | other)
    assert str(error.value) == (
        "services.learner: 1 of 1 actors cannot be placed: each needs 4 CPU and 0.52 GPU; free now:"
        f" 1 x (1 CPU, 0 GPU) and 1 x (24 CPU, 0.48 GPU, {ACCELERATOR}=B200, at most 0.12 on one)"
    )
    # a whole GPU needs no such remark, nor do those of actors that are placed at the same time
    needs = [Need("a-0", 0.5, 3), Need("a-1", 0.5, 3)]
    with pytest.raises(NoRoom, match=rf"\(48 CPU, 4 GPU, {ACCELERATOR}=B200\), for 2 actors"):
        place(needs, [node], {})


def test_what_all_actors_need_is_said_beside_what_is_free():
    """Each of them would fit alone."""
    needs = [Need("a-0", 1.5), Need("a-1", 1.5), Need("b-0", 0.5)]
    with pytest.raises(NoRoom) as error:
        place(needs, [Node("n", 3)])
    assert error.value.lines == [
        "services.b: 1 of 1 actors cannot be placed: each needs 0.5 CPU; free now: 1 x (3 CPU, 0"
        " GPU), for 3 actors that need 3.5 CPU and 0 GPU together"
    ]


def test_a_label_without_a_node_is_reported():
    with pytest.raises(ConfigError, match="no node has these labels"):
        check_placement(config(rollout={"labels.zone": "z"}), [Node("n", 64)])


def test_placement_without_nodes_is_refused():
    with pytest.raises(ConfigError, match="free now: no node"):
        check_placement(config(), [])


def test_larger_shares_of_a_gpu_are_found_per_node_and_service():
    """Whole GPUs, and shares of one size, need no order."""
    shares = {"learner": 1, "rollout": 0.7, "reward": 0.3, "encoder": 0.3, "scorers.shapes": 0.2}
    tables = {f"services.{kind}.gpus": share for kind, share in shares.items()}
    run = load("quickstart", [f"{key}={value}" for key, value in tables.items()])
    placer = Placer(run)
    on_a = ["learner-0", "rollout-0", "reward-0", "encoder-0", "scorers.shapes-0"]
    placer.put([*on_a, "scorers.shapes-1", "reward-1"], ["a"] * 5 + ["b"] * 2)

    def larger(kind: str, *nodes: str) -> list[str]:
        return placer.larger(kind, nodes)

    assert larger("learner", "a", "b") == larger("rollout", "a", "b") == []
    assert larger("reward", "a") == larger("encoder", "a") == ["rollout-0"]
    assert larger("scorers.shapes", "a") == ["rollout-0", "reward-0", "encoder-0"]
    assert larger("scorers.shapes", "b") == ["reward-1"]
    assert placer.nodes_of("scorers.shapes") == {"a", "b"}
    assert placer.nodes_of("rollout") == {"a"}


def test_actors_of_a_lost_node_are_placed_elsewhere():
    run = config(
        rollout={"actors": 2, "cpus": 1},
        reward={"cpus": 0},
        encoder={"cpus": 0},
        selector={"cpus": 0},
        learner={"cpus": 0},
    )
    x, y = Node("x", 1), Node("y", 1)
    placer = Placer(run)
    placer.refresh([x, y])
    placer.place_all(["rollout"])
    assert {placer.take("rollout-0"), placer.take("rollout-1")} == {"x", "y"}
    lost = placer.where("rollout-0")
    left = [node for node in (x, y) if node.id != lost]
    placer.refresh(left)
    with pytest.raises(NoRoom, match="1 of 1 actors cannot be placed"):
        placer.take("rollout-0")
    placer.refresh([*left, Node("z", 1)])
    assert placer.take("rollout-0") == "z"
    placer.release("rollout-1")
    assert placer.take("rollout-2") == left[0].id


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def placer_of(actors: int, clock: Clock | None = None) -> Placer:
    """Return a placer of a run with this many rollout actors of one CPU each."""
    return Placer(config(rollout={"actors": actors, "cpus": 1}), clock or Clock())


@pytest.mark.parametrize(("gpus", "learners"), [(2, 2), (1, 1), (0.5, 0)])
def test_after_the_loss_of_a_node_larger_shares_take_the_new_room_first(gpus, learners):
    """Rollout actors that came first would leave no GPU with room for a learner.

    They do not wait for learners that have no room anyway.
    """
    placer = Placer(
        config(
            learner={"replicas": 2, "gpus": 0.52, "cpus": 1},
            rollout={"actors": 2, "gpus": 0.36, "cpus": 1},
        ),
        Clock(),
    )
    placer.refresh([Node("x", 8, 2)])
    placer.place_all(["learner", "rollout"])
    names = [f"{kind}-{i}" for kind in ("rollout", "learner") for i in range(2)]
    assert [placer.take(name) for name in names] == ["x"] * 4
    assert sorted(placer.refresh([Node("y", 8, gpus)])["x"]) == sorted(names)
    for learner in range(learners):
        with pytest.raises(
            LargerFirst, match=f"rollout-0 starts after learner-{learner}, which needs"
        ):
            placer.take("rollout-0")
        assert placer.take(f"learner-{learner}") == "y"
    for learner in range(learners, 2):
        with pytest.raises(NoRoom, match="services.learner: 1 of 1 actors cannot be placed"):
            placer.take(f"learner-{learner}")
    assert placer.take("rollout-0") == "y"


def test_free_resources_of_a_node_are_kept_while_our_actors_change():
    """The share of a dying actor is still reported as taken; its replacement must not be refused
    for that.
    """
    placer = placer_of(1)
    placer.refresh([Node("x", 1)])
    placer.place_all(["rollout"])
    assert placer.take("rollout-0") == "x"
    placer.refresh([Node("x", 0)])
    assert placer.take("rollout-0") == "x"


def test_resources_of_other_jobs_are_updated_on_quiet_nodes():
    """Two of four CPUs belong to another job at first; later none, and then all that the run does
    not hold.
    """
    clock = Clock()
    placer = placer_of(1, clock)
    placer.refresh([Node("x", 2)])
    placer.place_all(["rollout"])
    placer.take("rollout-0")
    clock.now = SETTLED_S - 0.1
    placer.refresh([Node("x", 3)], ["rollout-0"])  # of 4, less those of the run
    with pytest.raises(NoRoom):
        placer.reserve(["rollout-1", "rollout-2"])
    clock.now = SETTLED_S
    placer.refresh([Node("x", 3)], ["rollout-0"])
    placer.reserve(["rollout-1", "rollout-2", "rollout-3"])
    with pytest.raises(NoRoom):
        placer.reserve(["rollout-4"])
    for actor in ("rollout-1", "rollout-2", "rollout-3"):
        placer.release(actor)
    clock.now += SETTLED_S
    placer.refresh([Node("x", 0)], ["rollout-0"])
    with pytest.raises(NoRoom):
        placer.reserve(["rollout-1"])


@pytest.mark.parametrize("taken", [False, True])
def test_a_starting_actor_is_not_counted_twice(taken):
    """Ray may still report resources as free that are reserved, or whose actor is starting; they
    are counted once.
    """
    clock = Clock()
    placer = placer_of(2, clock)
    placer.refresh([Node("x", 2)])
    placer.place_all(["rollout"])
    placer.take("rollout-0")
    if taken:
        placer.take("rollout-1")
    clock.now = 2 * SETTLED_S
    placer.refresh([Node("x", 1)], ["rollout-0"])
    with pytest.raises(NoRoom):
        placer.reserve(["rollout-2"])
    placer.refresh([Node("x", 0)], ["rollout-0", "rollout-1"])
    with pytest.raises(NoRoom):
        placer.reserve(["rollout-2"])


def test_resources_granted_by_ray_are_reserved():
    placer = placer_of(1)
    placer.refresh([Node("x", 1), Node("y", 0)])
    placer.place_all(["rollout"])
    placer.put(["rollout-1"], ["y"])
    assert placer.take("rollout-1") == "y"
    with pytest.raises(NoRoom):
        placer.reserve(["rollout-2"])


def test_scaling_places_as_many_actors_as_fit():
    placer = placer_of(1)
    placer.refresh([Node("x", 1), Node("y", 2)])
    placer.place_all(["rollout"])
    assert placer.reserve_some([f"rollout-{i}" for i in range(1, 5)]) == 2
    assert placer.where("rollout-2") is not None and placer.where("rollout-3") is None
    assert placer.reserve_some(["rollout-3"]) == 0


def test_actors_of_a_lost_node_are_reported_once():
    placer = placer_of(3)
    placer.refresh([Node("x", 2), Node("y", 1)])
    placer.place_all(["rollout"])
    gone = placer.refresh([Node("y", 1)])
    assert list(gone) == ["x"] and len(gone["x"]) == 2 and placer.where(gone["x"][0]) is None
    assert placer.refresh([Node("y", 1)]) == {}


@given(
    st.lists(
        st.tuples(
            st.integers(0, 8),
            st.sampled_from([0, 0.5, 1, 2.5, 4]),
            st.sampled_from(["B200", "H200", ""]),
        ),
        max_size=5,
    ),
    st.lists(
        st.tuples(
            st.sampled_from([0, 0.5, 1, 3]),
            st.sampled_from([0, 0.1, 0.3, 0.5, 1, 2]),
            st.booleans(),
            st.booleans(),
        ),
        max_size=12,
    ),
)
def test_every_placement_fits(machines, requested):
    nodes = [
        Node(f"n{i}", c, g, {ACCELERATOR: label} if label else {})
        for i, (c, g, label) in enumerate(machines)
    ]
    needs = [
        Need(f"k-{i}", c, g, B200 if bound else {}, spread)
        for i, (c, g, bound, spread) in enumerate(requested)
    ]
    try:
        chosen = place(needs, nodes)
    except NoRoom as error:
        assert error.lines
        return
    assert set(chosen) == {need.actor for need in needs}
    for node in nodes:
        here = [need for need in needs if chosen[need.actor] == node.id]
        assert fits(node, here) and all(matches(node.labels, need.labels) for need in here)
        assert sum(need.gpus for need in here) <= node.gpus + 1e-9
        assert sum(need.cpus for need in here) <= node.cpus + 1e-9
