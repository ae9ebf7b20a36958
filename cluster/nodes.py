"""What the nodes have free, and more nodes from Ray's autoscaler where one runs.

What is missing is asked for by placement groups that wait. Unlike ``ray.autoscaler.sdk.request_resources`` they count what other jobs
use, add up over jobs, and vanish with the job that made them: no node is paid for because of a run that is gone.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from cluster.placement import Need, Node, check_placement, kinds_of, needs_of
from configs.load import ConfigError
from configs.schema import RunConfig

BUSY_WAIT_S = 20.0
"""How long to wait for shares that a finished job has not given back yet."""
LOOK_S = 0.5
LEAST_CPU = 0.001
"""Of a bundle whose actor asks for nothing: Ray takes no empty ones."""


def free_nodes(ours: Collection[str] = ()) -> list[Node]:
    """Live nodes with what is free on each now; Ray's count lags behind by up to a second. What the placement groups ``ours`` (ids in
    hex) hold counts as free."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [_node(row, _with_groups(free.get(row["NodeID"], {}), ours)) for row in ray.nodes() if row["Alive"]]


def all_nodes() -> list[Node]:
    """Live nodes with all that they have, used or not."""
    return [_node(row, row["Resources"]) for row in ray.nodes() if row["Alive"]]


def _node(row: Mapping[str, Any], resources: Mapping[str, float]) -> Node:
    return Node(row["NodeID"], resources.get("CPU", 0.0), resources.get("GPU", 0.0), row.get("Labels") or {})


def _with_groups(free: Mapping[str, float], ours: Collection[str]) -> dict[str, float]:
    """A node's CPUs and GPUs, those in groups of ours too: Ray shows what bundle 0 of a group holds as ``CPU_group_0_<id>``. (The sum
    over its bundles, ``CPU_group_<id>``, is cut after four digits.)"""
    return {
        name: free.get(name, 0.0)
        + sum(share for key, share in free.items() if re.fullmatch(rf"{name}_group_\d+_({'|'.join(ours)})", key))
        for name in ("CPU", "GPU")
    }


class Requests:
    """Places that are waited for. Each is a placement group, so that Ray's autoscaler, where one runs, brings nodes for it."""

    def __init__(self) -> None:
        self._groups: dict[str, PlacementGroup] = {}

    def ask(self, key: str, needs: Sequence[Need]) -> bool:
        """Ask for room for all of ``needs`` at once, unless that was asked for under this key already; whether it is new."""
        if key in self._groups:
            return False
        bundles = [{"CPU": max(need.cpus, LEAST_CPU), **({"GPU": need.gpus} if need.gpus else {})} for need in needs]
        labels = [dict(need.labels) for need in needs]
        self._groups[key] = placement_group(bundles, strategy="PACK", bundle_label_selector=labels)
        return True

    def withdraw(self, *keys: str) -> None:
        """What was asked for under these keys is there, or wanted no longer; without a key, everything."""
        for key in keys or tuple(self._groups):
            if (group := self._groups.pop(key, None)) is not None:
                remove_placement_group(group)

    def free_nodes(self) -> list[Node]:
        """As ``free_nodes``, with what came for these requests counted as free."""
        return free_nodes([group.id.hex() for group in self._groups.values()])


async def find_room(
    config: RunConfig, kinds: Iterable[str] | None = None, tell: Callable[[str], None] = lambda line: None
) -> list[Node]:
    """The nodes, once every actor of the run has a place on them.

    Waits for what other jobs are about to give back (``BUSY_WAIT_S``), and for nodes that an autoscaler is asked for
    (``services.wait_for_nodes_s``); ``tell`` hears of it in a line. Raises ConfigError, a line per service: what is missing, what
    there is.
    """
    chosen = tuple(kinds if kinds is not None else kinds_of(config))
    began, wait_s = time.monotonic(), config.services.wait_for_nodes_s
    requests = Requests()
    try:
        while True:
            nodes = requests.free_nodes()
            try:
                check_placement(config, nodes, chosen)
                return nodes
            except ConfigError as error:
                if time.monotonic() - began > max(wait_s, BUSY_WAIT_S if _would_fit(config, chosen) else 0.0):
                    raise
                if wait_s and requests.ask("all", needs_of(config, chosen)):
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
