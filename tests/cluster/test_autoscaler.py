"""Ray's autoscaler (version 2) on simulated nodes.

A run that lacks nodes requests them, grows by those that come, gets another for a lost one, and
leaves no request behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import STDOUT
from typing import Any

import psutil
import pytest

from configs.schema import RunConfig
from records.rundir import RunDirectory
from tests.cluster.head import ROOT, Head, wait_for
from tests.cluster.processes import kill_tree
from tests.cluster.runs import tiny_config, write_toml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
MOST_NODES, WAIT_S = 3, 40
LABELS = {"pool": "explorers"}
HEAD_NODE = "f" * 51 + "00000"
"""Numbers of simulated nodes; the head is the first."""
COMMANDS = (
    "initialization",
    "setup",
    "head_setup",
    "worker_setup",
    "head_start_ray",
    "worker_start_ray",
)
ENVIRONMENT = {
    "RAY_enable_autoscaler_v2": "1",
    "RAY_FAKE_CLUSTER": "1",
    "RAY_CLOUD_INSTANCE_ID": HEAD_NODE,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_NODE,
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}


def autoscaling(port: int) -> dict[str, Any]:
    """Return a configuration with up to three nodes for rollout actors: a CPU, a named GPU, a
    label.

    An idle node is removed after a while.
    """
    common: dict[str, Any] = {"node_config": {}, "min_workers": 0}
    return {
        "cluster_name": "simulated",
        "max_workers": MOST_NODES,
        "idle_timeout_minutes": 0.75,
        "upscaling_speed": 100.0,
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": f"127.0.0.1:{port}",
            "head_node_id": HEAD_NODE,
            "launch_multiple": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {
            "ray.head.default": {**common, "resources": {"CPU": 8}, "max_workers": 0},
            "explorers": {
                **common,
                "resources": {"CPU": 1, "GPU": 1},
                "labels": LABELS,
                "max_workers": MOST_NODES,
            },
        },
        "head_node_type": "ray.head.default",
        "auth": {"ssh_user": "nobody"},
        "file_mounts": {},
        "cluster_synced_files": [],
        **{f"{which}_commands": [] for which in COMMANDS},
    }


class Job:
    """A run on a head, as a process that joins it.

    Simulated nodes share a directory, and would unpack a job's files over each other.
    """

    def __init__(self, head: Head, config: RunConfig, folder: Path):
        self.head, self.run = head, RunDirectory(Path(config.run_root or "") / config.name)
        self.address = f"127.0.0.1:{head.gcs}"
        program = [sys.executable, "-u", "-m", "tests.cluster.named_gpus"]
        command = [*program, "train", str(write_toml(config, folder))]
        environment = {**head.env, "RAY_ADDRESS": self.address}
        self._output = folder / f"{config.name}.out"
        # not a pipe, which is full after some 300 unread lines, and then the run would wait
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=STDOUT
            )

    def wait(self, *names: str, count: int = 1, seconds: float = 600) -> list[dict[str, Any]]:
        """Return the events of these names as soon as there are ``count``."""

        def there() -> list[dict[str, Any]]:
            assert self.process.poll() is None, self._output.read_text()
            found = [event for event in self.events() if event["event"] in names]
            return found if len(found) >= count else []

        return wait_for(there, seconds)

    def events(self) -> list[dict[str, Any]]:
        return self.run.events() if self.run.path.exists() else []

    def scale(self, size: int) -> subprocess.CompletedProcess[str]:
        return self.head.sol_rl("scale", "--rollout", size, "--address", self.address)

    def wishes(self) -> str:
        """Return what the autoscaler is asked for: waiting placement groups and requested
        resources.
        """
        code = (
            "from ray.autoscaler.v2.sdk import get_cluster_status as status\n"
            f"asked = status({self.address!r}).resource_demands\n"
            "print(asked.placement_group_demand, asked.cluster_constraint_demand)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=self.head.env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.stdout.strip()

    def stop(self) -> str:
        """Send SIGTERM, and return what was printed until the end."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=180)
        printed = self._output.read_text()
        assert self.process.returncode == 130, printed
        return printed


@contextmanager
def job_on_an_autoscaling_cluster(config: RunConfig, folder: Path) -> Iterator[Job]:
    head = Head(
        Path("/tmp") / f"sol-rl-auto-{os.getpid()}-{config.name}", autoscaling, **ENVIRONMENT
    )
    job = None
    try:
        head.wait()
        job = Job(head, config, folder)
        yield job
    finally:
        if job is not None:
            kill_tree(job.process)
        head.stop()


def explorers(**more: Any) -> dict[str, Any]:
    return {"cpus": 1, "gpus": 1, "labels": LABELS, "max_actors": 9, **more}


def nodes_of(head: Head) -> dict[str, psutil.Process]:
    """Return the processes of a cluster's nodes by node id: the head and its children."""
    found = {}
    for process in psutil.process_iter(["name"]):
        with suppress(psutil.NoSuchProcess):  # it ended just now
            if (
                process.info["name"] == "raylet"
                and head.owns(process)
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found[process.environ()["RAY_OVERRIDE_NODE_ID_FOR_TESTING"]] = process
    return found


def test_nodes_are_requested_replaced_and_released(ray_here, tiny_sd3_dir, tmp_path):
    services = {"rollout": explorers(actors=1), "wait_for_nodes_s": WAIT_S}
    config = tiny_config(tiny_sd3_dir, tmp_path, "asks", iterations=4000, services=services)
    with job_on_an_autoscaling_cluster(config, tmp_path) as job:
        (started,) = [
            event for event in job.wait("actor_started", count=5) if event["kind"] == "rollout"
        ]
        grown = job.scale(3)
        assert grown.returncode == 0 and "rollout: 1 -> 3 actors" in grown.stdout, (
            grown.stdout + grown.stderr
        )
        added = job.wait("actor_added", count=2)
        assert len({event["node"] for event in (started, *added)}) == MOST_NODES

        began = time.monotonic()
        refused = job.scale(4)
        assert refused.returncode == 2
        assert "cannot grow: services.rollout: 1 of 1 actors cannot be placed" in refused.stderr
        assert "each needs 1 CPU and 1 GPU on a node with pool=explorers" in refused.stderr, (
            refused.stderr
        )
        assert time.monotonic() - began >= WAIT_S, "a node had no time to come"
        assert job.wishes() == "[] []"

        nodes_of(job.head)[added[0]["node"]].kill()
        (lost,) = job.wait("node_lost")
        assert (lost["node"], lost["actors"]) == (
            added[0]["node"],
            [f"rollout-{added[0]['actor']}"],
        )
        (replaced,) = job.wait("actor_replaced")
        assert replaced["node"] not in {event["node"] for event in (started, *added)}
        assert job.wishes() == "[] []"

        assert job.scale(1).returncode == 0
        wait_for(lambda: len(nodes_of(job.head)) == 2)
        printed = job.stop()
    assert (
        f"waiting up to {WAIT_S} s for nodes: services.rollout: 1 of 1 actors cannot be placed"
        in printed
    )
    requested = [event["actors"] for event in job.events() if event["event"] == "nodes_asked"]
    assert requested == [
        ["rollout-1", "rollout-2"],
        ["rollout-3"],
        [f"rollout-{added[0]['actor']}"],
    ]


def test_an_autoscaled_pool_grows_to_the_nodes_that_exist(ray_here, tiny_sd3_dir, tmp_path):
    """From two it requests four, while three nodes exist; then six, while no more exist: it stays
    at three.
    """
    rule = {"enabled": True, "grow_above": 0.02, "shrink_below": 0.001, "patience": 1, "step": 1.0}
    services = {"rollout": explorers(actors=2), "wait_for_nodes_s": WAIT_S, "autoscale": rule}
    slow = {"explore__steps": 30, "regenerate__steps": 1}  # the learner waits
    config = tiny_config(
        tiny_sd3_dir, tmp_path, "sizes-itself", iterations=4000, services=services, **slow
    )
    with job_on_an_autoscaling_cluster(config, tmp_path) as job:
        (scaled,) = job.wait("pool_scaled")
        assert (scaled["before"], scaled["after"], scaled["asked"]) == (2, 3, 4)
        (refused,) = job.wait("scaling_refused")
        assert refused["asked"] == {"rollout": 6}
        assert "3 of 3 actors cannot be placed" in refused["why"]
        iterations = len(job.run.metrics())
        wait_for(lambda: len(job.run.metrics()) > iterations)
        assert not any(event["event"] == "actor_died" for event in job.events())
        job.stop()
