"""Free resources on the nodes of a real Ray, with and without pending requests for places."""

import asyncio
import time

import pytest
import ray

from cluster.runtime.nodes import Requests, find_room, free_nodes
from configs.load import ConfigError, load
from planning.placement import Need
from tests.cluster.head import wait_for


def cpus(nodes) -> float:
    return sum(node.cpus for node in nodes)


def test_requested_resources_are_reserved_until_the_request_is_withdrawn(ray_here):
    before, requests = cpus(free_nodes()), Requests()
    assert requests.request("a", [Need("rollout-0", 1.0), Need("rollout-1", 0.0)])
    assert not requests.request("a", [Need("rollout-0", 1.0)])  # requested already
    assert requests.request("b", [Need("rollout-2", 1.0, labels={"pool": "none"})])
    home = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    granted = wait_for(lambda: requests.granted("a"), 30)
    assert len(granted) == 2 and set(granted) <= home
    assert requests.granted("b") is None
    assert requests.granted("c") is None
    assert "b" in requests
    assert "c" not in requests
    wait_for(lambda: cpus(free_nodes()) == pytest.approx(before - 1, abs=0.01), 30)
    requests.withdraw()
    assert "a" not in requests
    wait_for(lambda: cpus(free_nodes()) == pytest.approx(before), 30)


def test_a_request_that_is_not_granted_in_time_is_an_error_and_is_withdrawn(ray_here):
    config = load(
        "quickstart",
        [
            "services.rollout.cpus=1",
            "services.rollout.labels={pool='none'}",
            "services.wait_for_nodes_s=1",
        ],
    )
    recorded: list[str] = []
    began = time.monotonic()
    with pytest.raises(
        ConfigError,
        match="services.rollout: 2 of 2 actors cannot be placed.*no node has these labels",
    ):
        asyncio.run(find_room(config, ["rollout"], recorded.append))
    assert time.monotonic() - began >= 1
    (line,) = recorded
    assert line.startswith(
        "waiting up to 1 s for nodes: services.rollout: 2 of 2 actors cannot be placed"
    )
    assert not [
        group for group in ray.util.placement_group_table().values() if group["state"] == "PENDING"
    ]
