"""Free resources of the nodes, and requests for more nodes from Ray's autoscaler.

Missing resources are requested by placement groups that stay pending. Unlike
``ray.autoscaler.sdk.request_resources``, they take into account what other jobs use, add up over
jobs, and end with their job, so that nobody pays for a node that a finished run has requested.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypedDict

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from configs.load import ConfigError
from configs.schema import RunConfig
from planning.placement import Need, Node, check_placement, kinds_of, needs_of

BUSY_WAIT_S = 20.0
"""How long to wait for resources that a finished job has not released yet."""
LOOK_S = 0.5
"""Interval at which free resources are polled; Ray sends no notification when they change."""
LAG_S = 5.0
"""Time after which released resources certainly appear in Ray's count of free resources."""
ALL_ACTORS = "all actors"
LEAST_CPU = 0.001
"""CPUs of the bundle of an actor that needs nothing: Ray does not accept empty bundles."""


class NodeRow(TypedDict):
    """The fields of a row of ``ray.nodes()`` that are used here."""

    NodeID: str
    Labels: dict[str, str] | None
    Resources: dict[str, float]
    NodeManagerAddress: str
    NodeManagerPort: int


def free_nodes() -> list[Node]:
    """Return the live nodes with their free resources; Ray's count lags by up to a second."""
    # private: Ray has no public function for the free resources of single nodes
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [_node(row, free.get(row["NodeID"], {})) for row in _alive()]


def all_nodes() -> list[Node]:
    """Return the live nodes with all their resources, used or not."""
    return [_node(row, row["Resources"]) for row in _alive()]


def addresses() -> dict[str, tuple[str, int]]:
    """Return (host, port) of every live node's manager, by node id."""
    return {row["NodeID"]: (row["NodeManagerAddress"], row["NodeManagerPort"]) for row in _alive()}


def object_stores() -> dict[str, float]:
    """Return the bytes of every live node's object store, by node id."""
    return {row["NodeID"]: row["Resources"].get("object_store_memory", 0.0) for row in _alive()}


def started_actors() -> set[str]:
    """Return the names of this job's actors that hold resources.

    Their processes exist, though they may still load models for minutes.
    """
    # private: Ray's public list asks the dashboard, which may not be running
    from ray._private.state import actors

    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    return {
        row["Name"] for row in actors(job_id=job).values() if row["Pid"] and row["State"] != "DEAD"
    }


def _alive() -> list[NodeRow]:
    return [row for row in ray.nodes() if row["Alive"]]


def _node(row: NodeRow, resources: Mapping[str, float]) -> Node:
    memory = resources.get("memory")  # without the object store
    return Node(
        row["NodeID"],
        resources.get("CPU", 0.0),
        resources.get("GPU", 0.0),
        row.get("Labels") or {},
        None if memory is None else memory / 1e9,
    )


class Requests:
    """Pending requests for resources: placement groups, for which Ray's autoscaler adds nodes.

    A group that was granted reserves its resources, so that nobody else counts them as free, until
    it is withdrawn for the actors to use them.
    """

    def __init__(self) -> None:
        self._groups: dict[str, PlacementGroup] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._groups

    def request(self, key: str, needs: Sequence[Need]) -> bool:
        """Request resources for all ``needs`` together; return False if ``key`` has a request."""
        if key in self._groups:
            return False
        # PACK: on as few new nodes as possible, because nodes are what is paid for
        bundles = [
            {"CPU": max(need.cpus, LEAST_CPU), **({"GPU": need.gpus} if need.gpus else {})}
            for need in needs
        ]
        labels = [dict(need.labels) for need in needs]
        self._groups[key] = placement_group(bundles, strategy="PACK", bundle_label_selector=labels)
        return True

    def granted(self, key: str) -> list[str] | None:
        """Return a node id for each need of the request, in order, or None until it is granted."""
        if key not in self._groups:
            return None
        table = placement_group_table(self._groups[key])
        if table.get("state") != "CREATED":
            return None
        nodes = table["bundles_to_node_id"]
        return [nodes[bundle] for bundle in sorted(nodes)]

    def withdraw(self, *keys: str) -> None:
        """Release these requests, or all if no key is given."""
        for key in keys or tuple(self._groups):
            if (group := self._groups.pop(key, None)) is not None:
                remove_placement_group(group)


async def find_room(
    config: RunConfig,
    kinds: Iterable[str] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Node]:
    """Wait until every actor of the run fits on the free nodes, and return these.

    Waits for resources that other jobs are about to release (``BUSY_WAIT_S``), and for nodes
    requested from an autoscaler (``services.wait_for_nodes_s``); calls ``tell`` with a line in that
    case. Raises ConfigError with a line per service that says what is missing and what is free.
    """
    chosen = tuple(kinds if kinds is not None else kinds_of(config))
    began, wait_s = time.monotonic(), config.services.wait_for_nodes_s
    requests, ask_at = Requests(), began
    try:
        while True:
            nodes, now = free_nodes(), time.monotonic()
            try:
                check_placement(config, nodes, chosen)
                return nodes
            except ConfigError as error:
                # wait if the nodes would suffice once they are free, or if more may be added
                if now - began > max(wait_s, BUSY_WAIT_S if _would_fit(config, chosen) else 0.0):
                    raise
                if requests.granted(ALL_ACTORS):
                    # the request holds the granted resources; they become free when it ends, after
                    # the lag of Ray's count
                    requests.withdraw()
                    ask_at = now + LAG_S
                elif (
                    wait_s
                    and now >= ask_at
                    and requests.request(ALL_ACTORS, needs_of(config, chosen))
                    and ask_at == began
                ):
                    tell(f"waiting up to {wait_s:g} s for nodes: {error}")
            await asyncio.sleep(LOOK_S)
    finally:
        requests.withdraw()


def _would_fit(config: RunConfig, kinds: Iterable[str]) -> bool:
    try:
        check_placement(config, all_nodes(), kinds)
    except ConfigError:
        return False
    return True
