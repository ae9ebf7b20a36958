"""``sol-rl doctor`` on a cluster: a process on every node answers."""

import json
import subprocess
import sys
import time

import pytest
import ray

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


def test_object_stores_of_many_nodes_are_a_range(monkeypatch):
    sizes = {f"{n}{'a' * 31}": 60e9 + n * 1e9 for n in range(4)}
    monkeypatch.setattr(doctor, "object_stores", lambda: sizes)
    assert doctor._stores(None)[0].found == ", ".join(f"{n}aaaaaaa {60 + n}.0 GB" for n in range(4))
    sizes["b" * 32] = 50e9
    assert doctor._stores(None)[0].found == "5 nodes, each 50.0 to 63.0 GB"


def test_nodes_that_do_not_answer_are_named_with_the_reason(ray_here, monkeypatch):
    """Two nodes fail to examine themselves, one to receive; the last answers."""
    real = doctor.all_nodes()[0]
    nodes = [Node(name * 8 + real.id, 4.0, 0.0) for name in "abcd"]
    failing = {"a": "examine_node", "b": "examine_node", "c": "receive"}
    call = doctor._on

    def on(node, function, *arguments):
        if failing.get(node[0]) == function.__name__:
            return ray.remote(fails).remote()
        return call(node[8:], function, *arguments)

    monkeypatch.setattr(doctor, "all_nodes", lambda: nodes)
    monkeypatch.setattr(doctor, "_on", on)
    monkeypatch.setattr(doctor, "SENT", 1000)
    found = doctor.check_cluster(None)
    failed = {check.name: check.found for check in found if check.outcome == "failed"}
    assert failed == {"node aaaaaaaa, bbbbbbbb, cccccccc": "ValueError: it broke"}
    (machine,) = [check for check in found if check.name.startswith("machine")]
    assert machine.name.endswith("(node dddddddd)")


@pytest.mark.parametrize(("ahead_s", "found"), [(5.0, 5.0), (-5.0, 5.0), (0.0, 0.0)])
def test_a_clock_differs_at_least_by_what_the_call_did_not_take(
    ahead_s, found, ray_here, monkeypatch
):
    now = time.time()
    monkeypatch.setattr(doctor, "_on", lambda *call: ray.put((now + ahead_s, 0.5)))
    monkeypatch.setattr(doctor.time, "time", lambda: now)
    assert doctor._link("node", []) == (pytest.approx(found), 0.5)


def fails() -> None:
    raise ValueError("it broke")


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
