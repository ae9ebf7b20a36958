"""Ray cluster in network namespaces of this machine, whose nodes can be cut off or switched off."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.cluster import templates
from tests.cluster.machine import own_mounts
from tests.cluster.network import Network, RayNodes

if TYPE_CHECKING:
    from tests.cluster.faults import FaultInjector

HEAD, LEARNERS, EXPLORERS = "head", ("learner", "second"), ("one", "two")
CPUS = {HEAD: 8, "learner": 1, "second": 1, "one": 4, "two": 4}
HEALTH = {"period_ms": "500", "timeout_ms": "1000", "failure_threshold": "3"}
"""Ray's health check settings, as docs/cluster.md recommends."""
DEADLINE_S = 15.0
START_S = 240.0


class Lab:
    """Ray cluster in namespaces; this process is the driver and joins the head's namespace."""

    def __init__(self, folder: Path):
        self.folder, self.network = folder, Network(HEAD, *LEARNERS, *EXPLORERS)
        self.rays = RayNodes(
            self.network,
            folder,
            RAY_AUTH_MODE="disabled",
            RAY_USAGE_STATS_ENABLED="0",
            GLOO_SOCKET_IFNAME="wire",
            OMP_NUM_THREADS="1",
            OMP_WAIT_POLICY="PASSIVE",
            **{f"RAY_health_check_{name}": value for name, value in HEALTH.items()},
        )
        self._stack, self._off, self._over = ExitStack(), set[str](), threading.Event()
        self._templates: dict[str, int] = {}  # machine -> process id of its fork template

    def __enter__(self) -> Lab:
        """Start all nodes and connect this process to the cluster."""
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        from tests.cluster.wire import enter
        from tests.tiny_sd3 import make_tiny_sd3

        os.environ["RAY_AUTH_MODE"] = "disabled"
        make_tiny_sd3(self.folder / "model")
        make_tiny_sd3(self.folder / "wide", heads=32)
        self._stack.enter_context(self.network)
        self._start_templates()
        enter(self.network.namespace(HEAD))
        own_mounts({str(self.rays.ray_folder(HEAD)): "/tmp/ray"})
        for name in self.network.names:
            self.on(name)
            if name == HEAD:
                self._join()
        self.restore()
        threading.Thread(target=self._keep, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        import ray

        self._over.set()
        ray.shutdown()
        self.rays.stop()
        self._stack.close()

    def _start_templates(self) -> None:
        names = self.network.names
        places = [f"{self.network.namespace(name)}={self.rays.ray_folder(name)}" for name in names]
        command = [sys.executable, "-m", "tests.cluster.templates"]
        command += [self.config("template").model_dump_json(), *places]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        process = subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE)
        assert process.stdin is not None and process.stdout is not None
        self._stack.callback(process.stdin.close)  # the template processes end at end of input
        self._templates = dict(zip(names, map(int, process.stdout.readline().split()), strict=True))

    def _join(self) -> None:
        import ray

        deadline = time.monotonic() + START_S
        while True:
            try:
                ray.init(address=self.rays.head, logging_level=logging.ERROR, log_to_driver=False)
                return
            except (ConnectionError, RuntimeError, ValueError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)

    def on(self, name: str) -> None:
        """Start the Ray node of a machine."""
        from cluster.runtime.launcher import SOCKET

        self._off.discard(name)
        pool = "learner" if name in LEARNERS else "explorers" if name in EXPLORERS else "head"
        labels = f"--labels=pool={pool},host={name}"
        template = {SOCKET: str(self.rays.ray_folder(name) / templates.SOCKET)}
        self.rays.start(name, f"--num-cpus={CPUS[name]}", labels, **template)

    def off(self, name: str) -> None:
        """Power off a machine: cut its network and kill its processes, except the template."""
        self._off.add(name)
        self.network.between([name], self.network.names, cut=True)
        self.rays.kill(name, all_but=self._templates[name])
        self.network.everywhere()

    def _keep(self) -> None:
        """Restart Ray on nodes where it has ended, as a machine's own process supervisor would."""
        while not self._over.wait(1.0):
            for name in self.network.names:
                if name not in self._off and self.rays.ended(name):
                    self.on(name)

    def restore(self) -> None:
        """Heal the network, end processes of earlier runs and wait until all nodes are free."""
        import ray

        from tests.cluster.hosts import end_idle

        self.network.everywhere()
        end_idle()
        deadline = time.monotonic() + START_S
        while sum(row["Alive"] for row in ray.nodes()) < len(CPUS) or ray.available_resources().get(
            "CPU"
        ) != sum(CPUS.values()):
            assert time.monotonic() < deadline, [row["Alive"] for row in ray.nodes()]
            time.sleep(0.5)

    def config(self, name: str, wide: bool = False, **changes: Any) -> Any:
        """Return the configuration of the tiny run with each service pinned to its machines."""
        from tests.cluster.faults import SERVICES
        from tests.cluster.runs import tiny_config

        pools = {"rollout": "explorers", "learner": "learner"}
        services: dict[str, Any] = {}
        for kind in SERVICES:
            services[f"services__{kind}__labels"] = {"pool": pools.get(kind, "head")}
            services[f"services__{kind}__deadline_s"] = DEADLINE_S
        services |= {
            "services__learner__deadline_s": 2 * DEADLINE_S,
            "services__learner__silence_s": DEADLINE_S,
            "services__learner__cpus": 1,
        }
        model = self.folder / ("wide" if wide else "model")
        return tiny_config(model, self.folder, name, **(services | changes))

    def run(self, name: str, injector: FaultInjector, **changes: Any) -> Any:
        """Run the configuration ``name`` with ``injector`` and return digests of its results."""
        from cluster.runtime import launcher
        from tests.cluster.outcomes import outcome
        from tests.cluster.runs import run_here

        # the launcher replaces the interpreter; each node's environment names the template to fork
        command = shlex.join([sys.executable, "-IS", os.path.abspath(launcher.__file__)])
        forked = {"py_executable": command}
        with mock.patch("cluster.runtime.template.runtime_env", lambda config, kind: forked):
            run = run_here(self.config(name, **changes), progress=injector)
        return outcome(run, 3)
