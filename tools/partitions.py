"""``make partitions``: runs on machines that are really apart, while their network fails.

Nodes of a Ray cluster live in network namespaces of this machine, joined by a wire that delays,
loses and cuts (``tests.cluster.network``). Each scenario is a tiny run, compared bit by bit with an
undisturbed one. Exit code 1 when one ended otherwise. Needs root on Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from typing import Any
from unittest import mock

from tests.cluster import templates
from tests.cluster.machine import own_mounts
from tests.cluster.network import Network, RayNodes, missing

HEAD, LEARNERS, EXPLORERS = "head", ("learner", "second"), ("one", "two")
CPUS = {HEAD: 8, "learner": 1, "second": 1, "one": 4, "two": 4}
HEALTH = {"period_ms": "500", "timeout_ms": "1000", "failure_threshold": "3"}
"""As docs/cluster.md advises."""
CUT_S = 30.0
DEADLINE_S = 15.0
START_S = 240.0
PINNED = {"services__rollout__actors": 1, "services__rollout__labels": {"host": "one"}}
WIDE = {"wide": True}
"""A model whose weights are objects of their own: Ray sends what has less than 100 kB along with
messages, by way of the driver, past the line that is cut.
"""
GROUP = {"services__learner__replicas": 2, "services__learner__strategy": "spread"}

SHARED = {"-group": GROUP, "-wide": WIDE}
"""Settings that change results, so that there is an undisturbed run with each."""


@dataclass(frozen=True)
class Scenario:
    """A run and what happens to its network. ``at``: (iteration, moment) of ``acts``, which are
    done so many seconds after it; None: before the run starts.
    """

    name: str
    acts: Sequence[tuple[float, Callable[[Lab], None]]]
    at: tuple[int, str] | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    hit: str = "rollout"


def everywhere(**rule: float) -> tuple[float, Callable[[Lab], None]]:
    return 0.0, lambda lab: lab.network.everywhere(**rule)


def cut(ones: Sequence[str], others: Sequence[str]) -> tuple[float, Callable[[Lab], None]]:
    return 0.0, lambda lab: lab.network.between(ones, others, cut=True)


HEAL = (CUT_S, lambda lab: lab.network.everywhere())
SLOW = everywhere(delay_s=0.05, loss=0.01)
SCENARIOS = {
    "slow": Scenario("50 ms and 1 % loss everywhere", [SLOW]),
    "narrow": Scenario("100 Mbit/s everywhere", [everywhere(bytes_per_s=12.5e6)], None, WIDE),
    "head-30": Scenario(
        "head and explorer cut for 30 s, no other node for it",
        [cut([HEAD], ["one"]), HEAL],
        (0, "explored"),
        PINNED,
    ),
    "head-ever": Scenario(
        "head and one explorer cut for good", [cut([HEAD], ["one"])], (0, "explored")
    ),
    "learner-30": Scenario(
        "learner and both explorers cut for 30 s, while weights are sent",
        [cut(LEARNERS, EXPLORERS), HEAL],
        (0, "export"),
        WIDE,
    ),
    "learner-ever": Scenario(
        "learner and one explorer cut for good, while weights are sent",
        [cut(LEARNERS, ["one"])],
        (0, "export"),
        WIDE,
    ),
    "back": Scenario(
        "an explorer's node switched off, back after 30 s, no other node for it",
        [(0.0, lambda lab: lab.off("one")), (CUT_S, lambda lab: lab.on("one"))],
        (0, "explored"),
        PINNED,
    ),
    "group-slow": Scenario("two learner replicas, 50 ms and 1 % loss", [SLOW], None, GROUP),
    "group-30": Scenario(
        "two learner replicas cut from each other for 30 s",
        [cut(["learner"], ["second"]), HEAL],
        (1, "regenerated"),  # the update comes next
        GROUP,
        "learner",
    ),
}


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
        from cluster.runtime.template import SOCKET

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

        from tests.cluster.hosts import IDLE

        self.network.everywhere()
        for handles in IDLE.values():
            while handles:
                ray.kill(handles.pop())
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

    def run(self, name: str, scenario: Scenario | None, **changes: Any) -> tuple[Any, Any]:
        """(digests of what came out, the injector) of a run."""
        from tests.cluster.faults import outcome
        from tests.cluster.runs import run_here

        injector = _injector(self, scenario)
        forked = {"py_executable": _launcher()}
        with mock.patch("cluster.runtime.template.runtime_env", lambda config, kind: forked):
            run = run_here(self.config(name, **changes), progress=injector)
        return outcome(run, 3), injector


def _launcher() -> str:
    """Ray starts this in Python's place; which template forks says each node's environment."""
    import shlex

    from cluster.runtime import template

    return shlex.join([sys.executable, "-IS", os.path.abspath(template.__file__)])


def _injector(lab: Lab, scenario: Scenario | None) -> Any:
    from tests.cluster.faults import FaultInjector

    class Cutter(FaultInjector):
        done_at: float | None = None

        def _happened(self, moment: str) -> None:
            super()._happened(moment)
            if scenario and self.done_at is None and scenario.at == (self.now, moment):
                self.done_at = time.time()
                loop = asyncio.get_running_loop()
                for delay, act in scenario.acts:
                    loop.call_later(delay, lambda act=act: loop.run_in_executor(None, act, lab))

    return Cutter()


def measure(lab: Lab, key: str, undisturbed: dict[str, Any]) -> dict[str, Any]:
    """A row: what a scenario's run came to, and when."""
    from records.rundir import RunDirectory

    scenario = SCENARIOS[key]
    if scenario.at is None:
        for _, act in scenario.acts:
            act(lab)
    began = time.monotonic()
    row: dict[str, Any] = {"key": key, "scenario": scenario.name, "noticed": None, "replaced": None}
    try:
        found, injector = lab.run(key, scenario, **scenario.changes)
    except Exception as error:
        row |= {"same": False, "why": f"{type(error).__name__}: {error}"}
        return row | {"seconds": round(time.monotonic() - began, 1)}
    row |= {"same": found == undisturbed, "seconds": round(time.monotonic() - began, 1)}
    if injector.done_at is not None:
        events = RunDirectory(lab.folder / "runs" / key).events()
        for name, event in (("noticed", "actor_died"), ("replaced", "actor_replaced")):
            times = [
                each["time"] - injector.done_at
                for each in events
                if each["event"] == event and each["kind"] == scenario.hit
            ]
            row[name] = round(min(times), 1) if times else None
    elif scenario.at is not None:
        row |= {"same": False, "why": "the moment never came"}
    return row


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown."""
    lines = [
        "| network | noticed | replaced | whole run | same bits |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        times = [row["noticed"], row["replaced"]]
        said = " | ".join("" if seconds is None else f"{seconds:.1f} s" for seconds in times)
        same = "yes" if row["same"] else f"NO {row.get('why', '')}"
        lines.append(f"| {row['scenario']} | {said} | {row['seconds']:.0f} s | {same} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every run ended as the undisturbed one."""
    parser = argparse.ArgumentParser(prog="python -m tools.partitions")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--out", metavar="FILE", help="a row of JSON per scenario")
    options = parser.parse_args(arguments)
    if why := missing():
        print(f"not tried: {why}")
        return 0
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sol-rl-partitions-"))
        lab = stack.enter_context(Lab(Path(folder)))
        undisturbed: dict[str, Any] = {}
        for key in options.only:
            changes = SCENARIOS[key].changes
            suffix = next((name for name, each in SHARED.items() if each is changes), "")
            settings = SHARED.get(suffix, {})
            quiet = f"undisturbed{suffix}"
            if quiet not in undisturbed:
                began = time.monotonic()
                undisturbed[quiet], _ = lab.run(quiet, None, **settings)
                print(f"{quiet}: {time.monotonic() - began:.0f} s", flush=True)
                lab.whole()
            rows.append(measure(lab, key, undisturbed[quiet]))
            print("\n".join(table(rows[-1:])[2:]), flush=True)
            lab.whole()
    print("\n".join(table(rows)))
    if options.out:
        Path(options.out).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0 if all(row["same"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
