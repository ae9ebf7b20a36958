"""``sol-rl doctor`` on a cluster: every node is asked by a process on it."""

import json

import pytest

from cli.main import main
from configs.load import load
from tests.cluster.nodes import Machines


def test_the_cluster_that_is_connected(ray_here, tmp_path, capsys):
    code = main(["doctor", "quickstart", "--set", f"run_root={tmp_path}", "--address", "auto"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0, lines
    assert any("actors have a place" in line for line in lines)
    assert any(f"{tmp_path}, seen and written by 1" in line for line in lines)
    assert any(line.startswith("ok      object store: ") for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_nobody_listens(monkeypatch, capsys):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    assert main(["doctor", "--address", "127.0.0.1:9"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "127.0.0.1:9: no Ray cluster answers there" in line


@pytest.mark.slow
def test_simulated_nodes_are_compared_and_the_link_is_timed(tmp_path, capsys):
    """In a process without another Ray."""
    import ray

    from cluster.jobs.doctor import of_cluster

    assert not ray.is_initialized()
    config = load("quickstart", [f"run_root={tmp_path}"])
    with Machines({"num_cpus": 4}, {"num_cpus": 2}, {"num_cpus": 2}):
        checks = {check.name: check for check in of_cluster(config)}
    assert all(check.outcome != "failed" for check in checks.values()), checks
    assert sum(name.startswith("machine") for name in checks) == 3
    assert "MB/s" in checks["bandwidth"].found and "seen and written by 3" in json.dumps(
        checks["shared directory"].found
    )
