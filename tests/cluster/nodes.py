"""A run on four simulated nodes of which one is removed, in a process of its own: ``python -m tests.cluster.nodes MODEL ROOT NAME KIND``.

KIND says whose node goes, in the middle of iteration 1: ``learner`` or ``rollout``.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from cluster.progress import Progress
from cluster.rundir import RunDirectory
from cluster.session import Session
from configs.prompts import read_prompts
from tests.cluster.runs import tiny_config


class Remover(Progress):
    """Takes away the node of the first actor of ``kind``, with all that is on it."""

    session: Any = None

    def __init__(self, cluster: Cluster, kind: str):
        super().__init__()
        self.cluster, self.kind, self.done = cluster, kind, False

    def advanced(self, stage: str, n: int = 1) -> None:
        super().advanced(stage, n)
        if self.done or self.iteration != 1 or stage != ("regenerated" if self.kind == "learner" else "explored"):
            return
        self.done = True
        where = getattr(self.session.services, self.kind).workers[0].facts["node"]
        (node,) = [node for node in self.cluster.list_all_nodes() if node.node_id == where]
        asyncio.get_running_loop().run_in_executor(None, lambda: self.cluster.remove_node(node, allow_graceful=False))


def main(model: str, root: str, name: str, kind: str) -> None:
    config = tiny_config(
        Path(model),
        Path(root),
        name,
        services__learner={"labels": {"pool": "learner"}, "cpus": 1},
        services__rollout={"labels": {"pool": "rollout"}, "cpus": 1},
        services__reward__labels={"pool": "none"},
        services__encoder__labels={"pool": "none"},
        services__selector__labels={"pool": "none"},
    )
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "labels": {"pool": "none"}, "include_dashboard": False})
    for pool, cpus in (("learner", 1), ("learner", 1), ("rollout", 2), ("rollout", 2)):
        cluster.add_node(num_cpus=cpus, labels={"pool": pool})
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    rundir = RunDirectory.of(config)
    rundir.create(config)
    prompts = read_prompts(config.prompts.train)
    remover = Remover(cluster, kind)
    session = Session(config, rundir, prompts, prompts[: config.evaluate.prompts], remover)
    remover.session = session
    try:
        asyncio.run(session.run(resume=False))
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert remover.done


if __name__ == "__main__":
    main(*sys.argv[1:])
