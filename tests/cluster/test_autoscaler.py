"""Ray's own autoscaler, on simulated nodes: a run that lacks nodes asks for them, grows within what it gives, and is told where that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import pytest
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from cluster.rundir import RunDirectory
from tests.cluster.processes import kill_tree
from tests.cluster.runs import tiny_config, write_toml
from tests.cluster.test_jobs import ROOT, Head, wait_for

MOST_NODES, WAIT_S = 2, 120
COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
ENVIRONMENT = {
    "RAY_enable_autoscaler_v2": "1",  # the one before it takes no notice of labels
    "RAY_FAKE_CLUSTER": "1",
    "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}
LABELS = {"pool": "explorers"}


def autoscaling(port: int) -> dict[str, Any]:
    """Up to two nodes of one CPU for explorers, besides the head; one that idles is taken away after long."""
    common: dict[str, Any] = {"node_config": {}, "min_workers": 0}
    return {
        "cluster_name": "simulated",
        "max_workers": MOST_NODES,
        "idle_timeout_minutes": 30,
        "upscaling_speed": 100.0,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": f"127.0.0.1:{port}",
            "head_node_id": FAKE_HEAD_NODE_ID,
            "launch_multiple": True,
        },
        "available_node_types": {
            "ray.head.default": {**common, "resources": {"CPU": 8}, "max_workers": 0},
            "explorers": {**common, "resources": {"CPU": 1}, "labels": LABELS, "max_workers": MOST_NODES},
        },
        "head_node_type": "ray.head.default",
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        **{f"{which}_commands": [] for which in COMMANDS},
    }


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_missing_nodes_are_asked_for_and_come(ray_here, tiny_sd3_dir, tmp_path):
    """No node has the explorers' label when the run starts; one comes, a second for the second explorer, never a third."""
    folder = Path("/tmp") / f"sol-rl-auto-{os.getpid()}"
    head = Head(folder, autoscaling, **ENVIRONMENT)
    driver: subprocess.Popen[str] | None = None
    try:
        head.wait()
        rollout = {"actors": 1, "max_actors": 9, "cpus": 1, "labels": LABELS}
        config = tiny_config(
            tiny_sd3_dir, tmp_path, "asks", iterations=4000, services={"rollout": rollout, "wait_for_nodes_s": WAIT_S}
        )
        file, run = write_toml(config, tmp_path), Path(config.run_root or "") / "asks"
        # joined, not submitted: simulated nodes share a directory, and would unpack a job's files over each other
        command = [sys.executable, "-m", "cluster", "train", str(file)]
        address = f"127.0.0.1:{head.gcs}"
        driver = subprocess.Popen(
            command, cwd=ROOT, env={**head.env, "RAY_ADDRESS": address}, stdout=DEVNULL, stderr=PIPE, text=True
        )

        def explored() -> bool:
            assert driver.poll() is None, driver.stderr and driver.stderr.read()
            return (run / "metrics.jsonl").exists() and '"iteration"' in (run / "metrics.jsonl").read_text()

        wait_for(explored)
        scaled = head.sol_rl("scale", "--rollout", 2, "--address", address)
        assert scaled.returncode == 0 and "rollout: 1 -> 2 actors" in scaled.stdout, scaled.stdout + scaled.stderr
        explorers = [event for event in RunDirectory(run).events() if event.get("kind") == "rollout" and "node" in event]
        assert len({event["node"] for event in explorers}) == len(explorers) == 2
        began = time.monotonic()
        refused = head.sol_rl("scale", "--rollout", 3, "--address", address)
        assert refused.returncode == 2 and "cannot grow: services.rollout: 1 of" in refused.stderr, refused.stdout + refused.stderr
        assert "each needs 1 CPU on a node with pool=explorers" in refused.stderr
        assert time.monotonic() - began >= WAIT_S  # it had time to come
        status = head.sol_rl("status", "--run", "asks", "--address", address)
        assert "rollout-0.0" in status.stdout and "rollout-1.0" in status.stdout, status.stdout + status.stderr
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(180) == 130
    finally:
        if driver is not None:
            kill_tree(driver)
        head.stop()
