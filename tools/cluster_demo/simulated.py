"""Simulated cluster, and the commands that the demonstration runs on it."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cluster.jobs.job_log import ENDED
from records.rundir import RunDirectory

ROOT = Path(__file__).parents[2]
SERVICES = ("learner", "reward", "encoder", "selector")
NODE_CPUS = 3
SETTINGS = {
    "prompts.per_iteration": 2, "explore.pool_size": 16, "explore.chunk_size": 4,
    "explore.steps": 4, "selection.keep": 8, "regenerate.steps": 6,
    "optimizer.steps_per_iteration": 2, "optimizer.batch_size": 16, "evaluate.every": 0,
    "evaluate.prompts": 8, "evaluate.noises": 2, "evaluate.steps": 6, "logging.grid_prompts": 4,
    "services.rollout.cpus": 1, "services.rollout.max_actors": 3,
    "services.rollout.labels": '{"demo.node" = "rollout"}', "services.start_deadline_s": 1800,
    **{f"services.{kind}.labels": '{"demo.node" = "services"}' for kind in SERVICES},
    **{f"services.{kind}.deadline_s": 1800 for kind in (*SERVICES, "rollout")},
}  # fmt: skip
"""Overrides of the quickstart: less work per iteration, and deadlines for a slow machine."""


class DemoError(Exception):
    """Raised if the demonstration does not go as expected."""


class Demo:
    """Simulated cluster, with methods for the commands that a user would type."""

    def __init__(self, out: Path, iterations: int):
        self.out, self.iterations, self.say = out, iterations, partial(print, flush=True)
        self.began, self.folders = time.monotonic(), list[str]()
        # a job's entrypoint is `python`, looked up on the head's PATH; the token keeps other users
        # of this machine from submitting jobs
        os.environ["PATH"] = (
            f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        )
        os.environ |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        os.environ.setdefault("RAY_DASHBOARD_STARTUP_TIMEOUT_S", "300")  # for a busy machine
        os.environ.pop("RAY_ADDRESS", None)
        from ray.cluster_utils import Cluster

        port = _free_port()
        board = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": port}
        head = _node(labels={"demo.node": "services"}, **board)
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.add_node() for _ in range(2)]
        self.url, self.address = f"http://127.0.0.1:{port}", str(self.cluster.address)
        self.tell(
            f"a head and two nodes for rollout actors, {NODE_CPUS} nominal CPUs each; dashboard and"
            f" jobs at {self.url}, with a token"
        )

    def add_node(self) -> Any:  # Ray does not type its node
        """Add a simulated node for rollout actors, with a temporary directory of its own.

        With a shared directory, nodes would unpack a job's files over each other and remove files
        in use.
        """
        folder = tempfile.mkdtemp(prefix="sol-rl-", dir="/tmp")  # short: it holds Unix sockets
        self.folders.append(folder)
        return self.cluster.add_node(**_node(labels={"demo.node": "rollout"}, temp_dir=folder))

    def close(self) -> None:
        """Shut down the cluster and remove the temporary directories."""
        self.cluster.shutdown()
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)

    def tell(self, line: str) -> None:
        """Print a line with the time since the start."""
        self.say(f"[{time.monotonic() - self.began:6.1f} s] {line}")

    def sol_rl(self, *arguments: str, settings: Sequence[str] = ()) -> str:
        """Run a ``sol-rl`` command, print it and its output, and return the output.

        ``settings`` are passed as ``--set`` options and not printed. Raises DemoError if the exit
        code
        is not 0.
        """
        self.tell(f"$ {shlex.join(['sol-rl', *arguments])}{' --set ...' if settings else ''}")
        options = [part for setting in settings for part in ("--set", setting)]
        command = [sys.executable, "-m", "cluster", *arguments, *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        for line in done.stdout.splitlines():
            self.say(f"           {line}")
        if done.returncode:
            raise DemoError(
                f"sol-rl {arguments[0]} ended with {done.returncode}: {done.stderr.strip()}"
            )
        return done.stdout

    def submit(self, name: str, rollout: int) -> tuple[RunDirectory, str]:
        """Submit a run called ``name``; return its directory and the id of its job."""
        values = {
            "name": name,
            "run_root": str(self.out),
            "iterations": self.iterations,
            "services.rollout.actors": rollout,
            **SETTINGS,
        }
        settings = [f"{key}={value}" for key, value in values.items()]
        output = self.sol_rl("submit", "quickstart", "--address", self.url, settings=settings)
        return RunDirectory(self.out / name), output.splitlines()[0].removeprefix("submitted: ")

    def status_of(self, job: str) -> str:
        """Return the job's status, as named by Ray."""
        from cluster.jobs.dashboard import job_client

        return str(job_client(self.url).get_job_status(job))

    def last_words(self, job: str) -> str:
        """Return the last three lines of the job's log."""
        from cluster.jobs.dashboard import job_client

        lines = [
            line for line in job_client(self.url).get_job_logs(job).splitlines() if line.strip()
        ]
        return "".join(f"\n  {line}" for line in lines[-3:])

    def wait(self, job: str, ready: Callable[[], bool], what: str) -> None:
        """Wait until ``ready()``. Raises DemoError if the job ends first."""
        while not ready():
            status = self.status_of(job)
            if status in ENDED and not ready():
                hint = (
                    "; more --iterations make it longer"
                    if status == "SUCCEEDED"
                    else self.last_words(job)
                )
                raise DemoError(f"the job ended ({status}) before {what}{hint}")
            time.sleep(1)

    def finish(self, job: str) -> None:
        """Wait until the job has ended. Raises DemoError unless it succeeded."""
        while (status := self.status_of(job)) not in ENDED:
            time.sleep(1)
        if status != "SUCCEEDED":
            raise DemoError(f"the job ended {status}{self.last_words(job)}")
        self.tell(f"the job {job} ended: {status}")

    def remove_node_of(self, run: RunDirectory) -> None:
        """Kill the simulated node that hosts the first rollout actor, without notice."""
        start_events = ("actor_started", "actor_added", "actor_replaced")
        hosts = [
            event["node"]
            for event in run.events()
            if event["event"] in start_events and event["kind"] == "rollout" and event["actor"] == 0
        ]
        (node,) = [node for node in self.nodes if node.node_id == hosts[-1]]
        self.cluster.remove_node(node, allow_graceful=False)
        self.tell(
            f"removed the node {hosts[-1][:8]}, on which rollout-0 worked, with all its objects"
        )


def _node(**options: object) -> dict[str, Any]:
    """Return the arguments of a node, with explicit ports for its agents.

    Ray ends a node whose agents have not chosen their ports within seconds, which a slow machine
    can exceed.
    """
    ports = (
        "metrics_agent_port",
        "metrics_export_port",
        "dashboard_agent_listen_port",
        "runtime_env_agent_port",
    )
    return {"num_cpus": NODE_CPUS, **{name: _free_port() for name in ports}, **options}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
