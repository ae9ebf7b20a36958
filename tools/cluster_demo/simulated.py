"""The simulated cluster, and the commands that are typed at it."""

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
"""Over the quickstart: less work per iteration, and deadlines that a slow machine keeps."""


class Failed(Exception):
    """The demonstration did not go as it should."""


class Demo:
    """A simulated cluster and the commands that are typed at it."""

    def __init__(self, out: Path, iterations: int):
        self.out, self.iterations, self.say = out, iterations, partial(print, flush=True)
        self.began, self.folders = time.monotonic(), list[str]()
        # a job's entrypoint is `python`, found on the head's PATH; with a token, no other user of
        # this machine can submit jobs
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

        In a shared one, nodes would unpack a job's files over each other and remove those in use.
        """
        folder = tempfile.mkdtemp(prefix="sol-rl-", dir="/tmp")  # sockets: a short path
        self.folders.append(folder)
        return self.cluster.add_node(**_node(labels={"demo.node": "rollout"}, temp_dir=folder))

    def close(self) -> None:
        """End it all."""
        self.cluster.shutdown()
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)

    def tell(self, line: str) -> None:
        self.say(f"[{time.monotonic() - self.began:6.1f} s] {line}")

    def sol_rl(self, *arguments: str, settings: Sequence[str] = ()) -> str:
        """Run a command, print it and its output; returns the output.

        ``settings`` are given as ``--set`` options, and not printed.
        """
        self.tell(f"$ {shlex.join(['sol-rl', *arguments])}{' --set ...' if settings else ''}")
        given = [part for setting in settings for part in ("--set", setting)]
        command = [sys.executable, "-m", "cluster", *arguments, *given]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        for said in done.stdout.splitlines():
            self.say(f"           {said}")
        if done.returncode:
            raise Failed(
                f"sol-rl {arguments[0]} ended with {done.returncode}: {done.stderr.strip()}"
            )
        return done.stdout

    def submit(self, name: str, rollout: int) -> tuple[RunDirectory, str]:
        """Submit a run called ``name``; returns its directory and the job's id."""
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
        """The job's status, as Ray names it."""
        from cluster.jobs.dashboard import client_of

        return str(client_of(self.url).get_job_status(job))

    def last_words(self, job: str) -> str:
        """The last lines of the job's log."""
        from cluster.jobs.dashboard import client_of

        lines = [
            line for line in client_of(self.url).get_job_logs(job).splitlines() if line.strip()
        ]
        return "".join(f"\n  {line}" for line in lines[-3:])

    def wait(self, job: str, ready: Callable[[], bool], what: str) -> None:
        """Wait until ``ready()``; raises Failed when the job ends first."""
        while not ready():
            status = self.status_of(job)
            if status in ENDED and not ready():
                said = (
                    "; more --iterations make it longer"
                    if status == "SUCCEEDED"
                    else self.last_words(job)
                )
                raise Failed(f"the job ended ({status}) before {what}{said}")
            time.sleep(1)

    def finish(self, job: str) -> None:
        """Wait until the job has ended; raises Failed unless it succeeded."""
        while (status := self.status_of(job)) not in ENDED:
            time.sleep(1)
        if status != "SUCCEEDED":
            raise Failed(f"the job ended {status}{self.last_words(job)}")
        self.tell(f"the job {job} ended: {status}")

    def remove_node_of(self, run: RunDirectory) -> None:
        """Kill the simulated node of the first rollout actor, without notice."""
        started = ("actor_started", "actor_added", "actor_replaced")
        here = [
            event["node"]
            for event in run.events()
            if event["event"] in started and event["kind"] == "rollout" and event["actor"] == 0
        ]
        (node,) = [node for node in self.nodes if node.node_id == here[-1]]
        self.cluster.remove_node(node, allow_graceful=False)
        self.tell(
            f"removed the node {here[-1][:8]}, on which rollout-0 worked, and all that it held"
        )


def _node(**given: object) -> dict[str, Any]:
    """The arguments of a node, with ports for its agents.

    Ray ends a node whose agents have not chosen their ports within seconds: a slow machine needs
    them given.
    """
    ports = (
        "metrics_agent_port",
        "metrics_export_port",
        "dashboard_agent_listen_port",
        "runtime_env_agent_port",
    )
    return {"num_cpus": NODE_CPUS, **{name: _free_port() for name in ports}, **given}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
