"""A Ray head with a dashboard, in processes of its own, for tests that submit and watch jobs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from cluster.jobs.dashboard import job_client
from configs.load import ConfigError

ROOT = Path(__file__).parent.parent.parent


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


class Head:
    """A Ray head with its dashboard, in processes that end with the test.

    ``autoscaling``: the content of ``ray start --autoscaling-config``, as a function of its port.
    """

    def __init__(
        self,
        folder: Path,
        autoscaling: Callable[[int], dict[str, Any]] | None = None,
        **environment: str,
    ):
        self.gcs, self.port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("RAY_") or key == "RAY_worker_niceness"
        }
        path = (  # plain `python` is that of the head
            f"{Path(sys.executable).parent}{os.pathsep}{clean.get('PATH', '')}"
        )
        # with Ray's default, a token: the one of this process, which has started Ray before
        mode = {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token")}
        self.env = {
            **clean,
            **mode,
            "PATH": path,
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        start = [
            "start",
            "--head",
            "--block",
            f"--port={self.gcs}",
            f"--dashboard-port={self.port}",
            "--num-cpus=8",
            "--num-gpus=0",
        ]
        start += [
            "--include-dashboard=true",
            f"--temp-dir={folder}",
            "--node-ip-address=127.0.0.1",
            "--disable-usage-stats",
        ]
        # Ray ends a node whose agents have not chosen their ports within seconds, so on a busy
        # machine the ports are given
        agents = (
            "metrics-export-port",
            "dashboard-agent-grpc-port",
            "dashboard-agent-listen-port",
            "runtime-env-agent-port",
        )
        start += [f"--{name}={free_port()}" for name in agents]
        if autoscaling is not None:
            folder.mkdir(parents=True)
            (folder / "autoscaling.json").write_text(json.dumps(autoscaling(self.gcs)))
            start += [f"--autoscaling-config={folder / 'autoscaling.json'}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *start],
            env=self.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Wait until the dashboard accepts jobs."""
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "the head ended"
            try:
                job_client(self.url).list_jobs()
                return
            except (ConfigError, RuntimeError):
                time.sleep(1)
        raise AssertionError("no dashboard within 240 s")

    def stop(self) -> None:
        there = (
            [self.process, *psutil.Process(self.process.pid).children(recursive=True)]
            if self.process.poll() is None
            else []
        )
        for process in there:
            process.kill()
        self.process.wait(30)

    def owns(self, process: psutil.Process) -> bool:
        """Return True if a process belongs to this cluster: the head or its descendants started
        it.
        """
        return any(parent.pid == self.process.pid for parent in process.parents())

    def sol_rl(self, *arguments: Any, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cluster", *map(str, arguments)]
        return subprocess.run(
            command, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=timeout
        )


def wait_for(what, seconds: float = 600) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.5)
    raise AssertionError(f"not within {seconds:g} s")
