"""A real Prometheus scrapes a running job with the shipped configuration, and every dashboard
expression has data.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from records.prometheus import PrometheusExporter
from tests.cluster.runs import run_here, tiny_config
from tests.records.test_alerts import metric_names

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="no prometheus on PATH: apt-get install prometheus",
    ),
]
NOT_IN_THIS_RUN: dict[str, str] = {}
"""Expressions that have no data here, with the reason."""


WITHOUT_DATA = {"sol_rl_loss_clip_share"}
"""Metrics of alerts that have no data here: the run has another objective."""


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


class Server:
    """A Prometheus started by the test."""

    def __init__(self, port: int):
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: Any) -> Any:
        with urllib.request.urlopen(
            f"{self.url}/{path}?{urllib.parse.urlencode(parameters)}", timeout=60
        ) as answer:
            return json.loads(answer.read())["data"]

    def values(self, expression: str, start: float, end: float) -> list[float]:
        """Return all finite values of an expression, of all its series, every half second.

        Raises HTTPError if the expression cannot be parsed.
        """
        found = self.get("api/v1/query_range", query=expression, start=start, end=end, step="0.5")[
            "result"
        ]
        return [
            float(value)
            for series in found
            for _, value in series["values"]
            if value not in ("NaN", "+Inf", "-Inf")
        ]

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            return False


@contextmanager
def prometheus(folder: Path, metrics_port: int) -> Iterator[Server]:
    """Start Prometheus with ``deploy/prometheus.yml``, but with the test's target port and scrape
    interval.
    """
    config = (DEPLOY / "prometheus.yml").read_text()
    for shipped, ours in (
        ("127.0.0.1:9464", f"127.0.0.1:{metrics_port}"),
        ("scrape_interval: 5s", "scrape_interval: 500ms"),
    ):
        assert config.count(shipped) == 1
        config = config.replace(shipped, ours)
    (folder / "prometheus.yml").write_text(config)
    shutil.copy(DEPLOY / "alerts.yml", folder)  # its path is relative
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
    ]
    process = subprocess.Popen(
        [*command, f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    server = Server(port)
    try:
        deadline = time.monotonic() + 240
        while not server.ready():
            assert process.poll() is None, "prometheus ended"
            assert time.monotonic() < deadline, "prometheus did not start within 240 s"
            time.sleep(0.5)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def expressions() -> list[tuple[str, str]]:
    """Return (panel, expression) of the shipped dashboard."""
    board = json.loads((DEPLOY / "grafana" / "dashboards" / "sol-rl.json").read_text())
    return [
        (panel["title"], target["expr"]) for panel in board["panels"] for target in panel["targets"]
    ]


def test_the_shipped_configuration_is_valid():
    done = subprocess.run(
        ["promtool", "check", "config", str(DEPLOY / "prometheus.yml")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_panel_of_the_dashboard_has_data(ray_here, tiny_sd3_dir, tmp_path):
    """Six iterations with evaluations and a random audit; every expression is then queried over the
    time of the run.
    """
    port = free_port()
    config = tiny_config(
        tiny_sd3_dir,
        tmp_path,
        "watched",
        iterations=6,
        evaluate__every=2,
        audit__random_seeds=2,
        logging__prometheus_port=port,
    )
    with prometheus(tmp_path, port) as server:
        start = time.time()
        run = run_here(config)
        end = time.time()
        answers = {
            (panel, expression): server.values(expression, start, end)
            for panel, expression in expressions()
        }
        assert 1.0 in server.values('up{job="sol-rl"}', start, end)
        reward = server.values("sol_rl_reward_train_mean", start, end)
        left = server.values("sol_rl_iterations_left", start, end)
        unknown = [
            name
            for name in metric_names("sol_rl_")
            if not server.values(name, start, end) and name not in WITHOUT_DATA
        ]
    empty = {expression: panel for (panel, expression), values in answers.items() if not values}
    assert set(empty) == set(NOT_IN_THIS_RUN), empty
    assert not unknown, "metrics of deploy/alerts.yml"
    assert set(left) <= set(range(7)) and len(left) >= 2
    logged = [row["reward/train_mean"] for row in run.metrics() if row["kind"] == "iteration"]
    # the scraped values equal those of the file
    assert set(reward) <= set(logged) and len(reward) >= 2


@pytest.mark.parametrize("host", ["a\0b", "a" * 70])
def test_an_invalid_host_is_an_event(host):
    events: list[tuple[str, dict[str, Any]]] = []
    exporter = PrometheusExporter(9, host, lambda name, **more: events.append((name, more)))
    exporter.close()
    ((name, recorded),) = events
    assert name == "metrics_unavailable" and recorded["address"] == f"{host}:9" and recorded["why"]
