"""GPUs that join the cluster during a run and stay unused are reported."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.driver import actor_placement
from cluster.driver.actor_placement import ActorPlacement
from cluster.driver.scaling import Scaling, UnusedGpus
from configs.load import load
from planning.placement import Node
from records.progress import Progress
from records.rundir import RunDirectory

FIRST, SECOND, THIRD = "a" * 56, "b" * 56, "c" * 56


def reports(*gpus: int) -> list[dict[str, Any]]:
    """Return the events of iterations after which these numbers of GPUs were unused."""
    events: list[dict[str, Any]] = []
    unused = UnusedGpus(
        load("quickstart"), lambda name, **fields: events.append({name: fields}), lambda line: None
    )
    for each in gpus:
        unused.observe(each)
    return events


@pytest.mark.parametrize(
    ("seen", "reported"),
    [
        ([0, 0, 0], []),
        ([8], []),  # an actor may be about to start there
        ([8, 0, 8, 0], []),
        ([8, 8, 8], [8]),
        ([4, 8, 8, 16, 16, 0, 16, 16], [4, 8, 16]),
        ([8, 8, 3, 3, 8, 8], [8]),
    ],
)
def test_gpus_are_reported_after_two_iterations_and_when_they_become_more(seen, reported):
    assert reports(*seen) == [{"gpus_unused": {"gpus": gpus}} for gpus in reported]


@pytest.mark.parametrize(
    ("config", "scale", "resume"),
    [
        (load("quickstart"), True, False),
        (load("quickstart", ["arm=diffusionnft"]), False, False),
        (load("sana-sol_rl-hpsv2"), True, True),
    ],
)
def test_the_line_names_only_commands_that_help(config, scale, resume):
    lines: list[str] = []
    unused = UnusedGpus(config, lambda name, **fields: None, lines.append)
    unused.observe(8)
    unused.observe(8)
    (line,) = lines
    assert line.startswith("no job uses 8 GPUs that joined the cluster after the start")
    assert ("; `sol-rl scale` adds rollout actors" in line) == scale
    assert ("; a stop and --resume choose a new layout" in line) == resume


@pytest.fixture
def cluster(monkeypatch) -> dict[str, Node]:
    """Replace Ray by these nodes, by id."""
    nodes = {FIRST: Node(FIRST, 8, 8)}
    monkeypatch.setattr(actor_placement, "free_nodes", lambda: list(nodes.values()))
    monkeypatch.setattr(actor_placement, "addresses", dict)

    async def find_room(config: Any, kinds: Any) -> list[Node]:
        return list(nodes.values())

    monkeypatch.setattr(actor_placement, "find_room", find_room)
    return nodes


def test_whole_gpus_of_nodes_that_joined_after_the_start_are_counted(cluster):
    config = load("quickstart", ["services.encoder.cpus=1"])

    async def run() -> list[int]:
        places = ActorPlacement(config, lambda name, **fields: None)
        await places.choose(["encoder"])
        counts: list[int] = []

        def look(*nodes: Node) -> None:
            cluster.update({node.id: node for node in nodes})
            places.refresh([])
            counts.append(places.joined_gpus)

        look()  # those of the first node were there when the run chose its layout
        look(Node(SECOND, 8, 8), Node(THIRD, 8, 0.9))  # 0.9: the rest of a GPU that is shared
        await places.choose(["encoder"])  # services that start later do not make nodes first ones
        look()
        look(Node(SECOND, 8, 2.5))  # actors were started there
        del cluster[SECOND]
        look()
        await places.close()
        return counts

    assert asyncio.run(run()) == [0, 8, 8, 2, 0]


def test_a_run_looks_for_unused_gpus_after_each_iteration(tmp_path):
    rundir, looks = RunDirectory(tmp_path), list[str]()
    services: Any = SimpleNamespace(
        pools=[],
        rollout_pool=SimpleNamespace(alive=2),
        refresh_nodes=lambda: looks.append("refreshed"),
        places=SimpleNamespace(joined_gpus=8),
    )
    scaling = Scaling(load("quickstart"), services, rundir, Progress())
    for _ in range(3):
        scaling.end_iteration({"busy/learner": 0.5})
    assert len(looks) == 3
    (event,) = rundir.events()
    assert (event["event"], event["gpus"]) == ("gpus_unused", 8)
