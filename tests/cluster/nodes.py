"""Simulated nodes that can be removed, and runs on them: ``python -m tests.cluster.nodes MODEL
ROOT``.

The process reads a service per line from standard input, trains a run of that name in which the
service's node is lost in the middle of iteration 1, and prints a line. There are three nodes: a
head with all other services, and two that can hold the one.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from cluster.runtime.local_ray import retried_start
from tests.cluster.faults import SERVICES, Fault, FaultInjector
from tests.cluster.runs import run_here, tiny_config

MOMENTS = {
    "rollout": "explored",
    "reward": "explored",
    "encoder": "begin",
    "selector": "scored",
    "learner": "regenerated",
}
HEALTH = {"period_ms": "500", "timeout_ms": "1000", "failure_threshold": "5"}
"""Settings of the health checks that Ray's head makes of its nodes (docs/cluster.md).

They allow one failure more than is advised there, because here all nodes share a few cores.
"""
STARTED, DONE = "nodes: ready", "nodes: done"


class Machines:
    """A head with ``head`` and further ``nodes``, and a connection of this process to it.

    They exist within the ``with`` block.
    """

    def __init__(self, head: Mapping[str, Any], *nodes: Mapping[str, Any]):
        self._head, self._wanted = head, nodes
        self._gone: list[Mapping[str, Any]] = []
        self._args: dict[str, Mapping[str, Any]] = {}

    def __enter__(self) -> Machines:
        os.environ.update({f"RAY_health_check_{name}": value for name, value in HEALTH.items()})
        head = {"include_dashboard": False, **self._head}
        self._cluster = retried_start(lambda: Cluster(initialize_head=True, head_node_args=head))
        for node in self._wanted:
            self._add(node)
        ray.init(address=self._cluster.address, logging_level="ERROR", log_to_driver=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ray.shutdown()
        self._cluster.shutdown()

    def _add(self, node: Mapping[str, Any]) -> None:
        self._args[retried_start(lambda: self._cluster.add_node(**node)).node_id] = node

    def remove(self, node: str, workers: Sequence[int] = ()) -> None:
        """Send SIGKILL to all processes of a node at once, as if the machine were lost.

        Otherwise its workers would answer for another second. ``workers``: those that are no
        children of the node.
        """
        (found,) = [one for one in self._cluster.list_all_nodes() if one.node_id == node]
        (raylet,) = [psutil.Process(one.process.pid) for one in found.all_processes["raylet"]]
        everything = [raylet, *raylet.children(recursive=True)]
        for process in everything:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(found, allow_graceful=False)
        self._gone.append(self._args.pop(node))

    def repair(self) -> None:
        """Start new nodes in the place of those that were removed, or that Ray gave up."""
        alive = {row["NodeID"] for row in ray.nodes() if row["Alive"]}
        for node in self._cluster.list_all_nodes():
            if node.node_id in self._args and node.node_id not in alive:
                self.remove(node.node_id)
        while self._gone:
            self._add(self._gone.pop())


def lose_node(model: Path, root: Path, kind: str, machines: Machines) -> None:
    """Train a run named ``kind`` whose ``kind`` loses its node."""
    homes = {
        f"services__{service}__labels": {"pool": "two" if service == kind else "rest"}
        for service in SERVICES
    }
    injector = FaultInjector(Fault(kind, "node", 1, MOMENTS[kind]), machines=machines)
    run_here(tiny_config(model, root, kind, **homes), progress=injector)
    assert injector.done, "the node was not taken away"
    machines.repair()


def main(model: str, root: str) -> None:
    twin = {"num_cpus": 2, "labels": {"pool": "two"}}
    with Machines({"num_cpus": 16, "labels": {"pool": "rest"}}, twin, twin) as machines:
        print(STARTED, flush=True)
        for line in sys.stdin:
            try:
                lose_node(Path(model), Path(root), line.strip(), machines)
            except BaseException:
                traceback.print_exc()
                raise
            print(DONE, line.strip(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
