"""``sol-rl doctor`` on a cluster: a process on every node answers."""

import json
import subprocess
import sys

import pytest

from cli.main import main
from cluster.driver.store import published_bytes
from cluster.jobs import doctor
from planning.placement import Node
from tests.cluster.runs import tiny_config


def test_doctor_checks_the_connected_cluster(ray_here, tmp_path, capsys):
    code = main(["doctor", "quickstart", "--set", f"run_root={tmp_path}", "--address", "auto"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0, lines
    assert any("actors can be placed" in line for line in lines)
    assert any(f"{tmp_path}, readable and writable on 1" in line for line in lines)
    assert any(line.startswith("ok      object store: ") for line in lines)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("kind", "known"), [("B200", True), ("XPU", False), (None, False)])
def test_the_link_is_measured_with_as_many_bytes_as_weights(
    kind, known, tiny_sd3_dir, tmp_path, monkeypatch
):
    """Unknown ones, which depend on the kind of GPU, do not end the checks."""
    gpus = {"services__rollout__gpus": 1.0, "explore__backend": "auto"}
    config = tiny_config(tiny_sd3_dir, tmp_path, "doctor", **gpus)
    labels = {} if kind is None else {"ray.io/accelerator-type": kind}
    nodes = [Node("a" * 32, 64.0, 8.0, labels)]
    monkeypatch.setattr(doctor, "all_nodes", lambda: nodes)
    monkeypatch.setattr(doctor, "SENT", 1)
    expected = published_bytes(config, kind).total if known else 1
    assert doctor._bytes_to_send(config) == expected
    monkeypatch.setattr(doctor, "MOST_SENT", 100)
    assert doctor._bytes_to_send(config) == (100 if known else 1)
    nodes.clear()  # no room
    assert doctor._bytes_to_send(config) == doctor._bytes_to_send(None) == 1


def test_doctor_reports_that_nothing_listens_at_the_address(monkeypatch, capsys):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    assert main(["doctor", "--address", "127.0.0.1:9"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "127.0.0.1:9: no Ray cluster answers there" in line


NODES = """
import json, sys
from cluster.jobs.doctor import check_cluster
from configs.load import load
from planning.doctor import json_of
from tests.cluster.nodes import Machines

with Machines({"num_cpus": 4}, {"num_cpus": 2}, {"num_cpus": 2}):
    print(json.dumps(json_of(check_cluster(load("quickstart", ["run_root=" + sys.argv[1]])))))
"""


@pytest.mark.slow
def test_simulated_nodes_are_compared_and_the_link_is_timed(tmp_path):
    """It runs in a process without another Ray."""
    made = subprocess.run(
        [sys.executable, "-c", NODES, str(tmp_path)], capture_output=True, text=True, timeout=280
    )
    recorded = json.loads(made.stdout.splitlines()[-1])
    checks = {check["name"]: check for check in recorded["checks"]}
    assert recorded["ok"], checks
    assert sum(name.startswith("machine") for name in checks) == 3
    assert "MB/s" in checks["bandwidth"]["found"]
    assert checks["shared directory"]["found"] == f"{tmp_path}, readable and writable on 3 nodes"
