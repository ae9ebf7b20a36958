"""What is free on the nodes of a real Ray, with and without places that are waited for."""

import asyncio
import time

import pytest
import ray

from cluster.nodes import Requests, _with_groups, find_room, free_nodes
from cluster.placement import Need
from configs.load import ConfigError, load
from tests.cluster.head import wait_for


def cpus(nodes) -> float:
    return sum(node.cpus for node in nodes)


def test_a_groups_share_counts_for_whom_it_is():
    """Names as Ray writes them: a group's share on a node under the group's id, and again for each of its bundles."""
    mine = {"CPU_group_aa": 1.5, "CPU_group_0_aa": 1.0, "CPU_group_11_aa": 0.5, "GPU_group_aa": 0.5, "GPU_group_0_aa": 0.5}
    free = {"CPU": 2.0, **mine, "CPU_group_bb": 4.0, "CPU_group_0_bb": 4.0, "memory": 9.0}
    assert _with_groups(free, ["aa"]) == {"CPU": 3.5, "GPU": 0.5}
    assert _with_groups(free, ["aa", "bb"]) == {"CPU": 7.5, "GPU": 0.5}
    assert _with_groups(free, []) == {"CPU": 2.0, "GPU": 0.0}


def test_what_is_asked_for_is_kept_for_us_until_it_is_withdrawn(ray_here):
    before, requests = cpus(free_nodes()), Requests()
    assert requests.ask("a", [Need("rollout-0", 1.0), Need("rollout-1", 0.0)])
    assert not requests.ask("a", [Need("rollout-0", 1.0)])  # asked already
    wait_for(lambda: before - 1.1 < cpus(free_nodes()) < before - 0.9, 30)  # held
    wait_for(lambda: cpus(requests.free_nodes()) == pytest.approx(before), 30)  # and ours
    requests.withdraw()
    wait_for(lambda: cpus(free_nodes()) == pytest.approx(before), 30)


def test_what_does_not_come_is_said_in_time_and_asked_for_no_longer(ray_here):
    config = load("quickstart", ["services.rollout.cpus=1", "services.rollout.labels={pool='none'}", "services.wait_for_nodes_s=2"])
    told: list[str] = []
    began = time.monotonic()
    with pytest.raises(ConfigError, match="services.rollout: 2 of 2 actors have no place.*no node has these labels"):
        asyncio.run(find_room(config, ["rollout"], told.append))
    assert time.monotonic() - began >= 2
    (line,) = told
    assert line.startswith("waiting up to 2 s for nodes: services.rollout: 2 of 2 actors have no place")
    assert not [group for group in ray.util.placement_group_table().values() if group["state"] == "PENDING"]
