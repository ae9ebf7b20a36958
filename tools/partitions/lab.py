"""A Ray cluster in network namespaces of this machine: nodes are cut off, and switched off."""

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
"""As docs/cluster.md advises."""
DEADLINE_S = 15.0
START_S = 240.0


class Lab:
    """A Ray cluster in namespaces; this process is its driver, in the head's."""

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
        self._templates: dict[str, int] = {}  # processes

    def __enter__(self) -> Lab:
        """Start everything, and join it."""
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
        self.whole()
        threading.Thread(target=self._keep, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        import ray

        self._over.set()
        ray.shutdown()
        self.rays.stop()
        self._stack.close()

    def _start_templates(self) -> None:
        names = self.network.names
        places = [f"{self.network.namespace(it)}={self.rays.ray_folder(it)}" for it in names]
        command = [sys.executable, "-m", "tests.cluster.templates"]
        command += [self.config("template").model_dump_json(), *places]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        made = subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE)
        assert made.stdin is not None and made.stdout is not None
        self._stack.callback(made.stdin.close)  # then they end
        self._templates = dict(zip(names, map(int, made.stdout.readline().split()), strict=True))

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
        """Switch a machine on."""
        from cluster.runtime.launcher import SOCKET

        self._off.discard(name)
        pool = "learner" if name in LEARNERS else "explorers" if name in EXPLORERS else "head"
        labels = f"--labels=pool={pool},host={name}"
        template = {SOCKET: str(self.rays.ray_folder(name) / templates.SOCKET)}
        self.rays.start(name, f"--num-cpus={CPUS[name]}", labels, **template)

    def off(self, name: str) -> None:
        """Switch it off."""
        self._off.add(name)
        self.network.between([name], self.network.names, cut=True)
        self.rays.kill(name, all_but=self._templates[name])
        self.network.everywhere()

    def _keep(self) -> None:
        """What a machine's own supervisor does: Ray is started again where it has ended."""
        while not self._over.wait(1.0):
            for name in self.network.names:
                if name not in self._off and self.rays.ended(name):
                    self.on(name)

    def whole(self) -> None:
        """All nodes are there, without a process of an earlier run on them."""
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
        """The tiny run, its services on their machines."""
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
        """Digests of what came out of a run, to which ``injector`` may do something."""
        from cluster.runtime import launcher
        from tests.cluster.outcomes import outcome
        from tests.cluster.runs import run_here

        # in Python's place; which template forks, each node's environment says
        command = shlex.join([sys.executable, "-IS", os.path.abspath(launcher.__file__)])
        forked = {"py_executable": command}
        with mock.patch("cluster.runtime.template.runtime_env", lambda config, kind: forked):
            run = run_here(self.config(name, **changes), progress=injector)
        return outcome(run, 3)
