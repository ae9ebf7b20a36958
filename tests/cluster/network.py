"""Simulated machines: network namespaces with addresses, a wire between them, and a Ray node in
each.

The wire is ``tests.cluster.wire``.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.cluster.wire import INTERFACE

LONGEST_START_S = 120.0
ROOT = Path(__file__).parent.parent.parent


def missing() -> str | None:
    """Return why there can be no such network here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces take root on Linux"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return tried.stderr.strip() or "no network namespaces" if tried.returncode else None


class Network:
    """Namespaces ``names``, each with an address, joined by a wire without delay or loss at
    first.
    """

    def __init__(self, *names: str):
        self.names, self._tag = names, f"sr{os.getpid()}"
        self.addresses = {
            name: f"10.{77}.{os.getpid() % 250}.{i}" for i, name in enumerate(names, 1)
        }
        self._folder = Path(tempfile.mkdtemp(prefix="sol-rl-wire-"))

    def __enter__(self) -> Network:
        for name in self.names:
            there = self.namespace(name)
            _ip("netns", "add", there)
            _ip("-n", there, "tuntap", "add", "dev", INTERFACE, "mode", "tun")
            _ip("-n", there, "addr", "add", f"{self.addresses[name]}/24", "dev", INTERFACE)
            _ip("-n", there, "link", "set", INTERFACE, "up")
            _ip("-n", there, "link", "set", "lo", "up")
        places = [f"{self.namespace(name)}={ip}" for name, ip in self.addresses.items()]
        command = [sys.executable, "-m", "tests.cluster.wire", str(self._socket), *places]
        self._wire = subprocess.Popen(command, cwd=ROOT)
        deadline = time.monotonic() + LONGEST_START_S
        while not self._socket.exists():
            assert self._wire.poll() is None and time.monotonic() < deadline, "no wire"
            time.sleep(0.02)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._wire.kill()
        self._wire.wait()
        for name in self.names:
            _ip("netns", "delete", self.namespace(name))
        shutil.rmtree(self._folder)

    @property
    def _socket(self) -> Path:
        return self._folder / "wire"

    def namespace(self, name: str) -> str:
        """Return the namespace's name in ``ip netns``."""
        return f"{self._tag}-{name}"

    def between(self, ones: Sequence[str], others: Sequence[str], **rule: Any) -> None:
        """Set the rule of packets between any of these, both ways: ``delay_s``, ``loss``,
        ``bytes_per_s``, ``cut``.

        Without any of them, packets pass unchanged.
        """
        pairs = {tuple(sorted((one, other))) for one in ones for other in others if one != other}
        named = [[self.namespace(name) for name in pair] for pair in sorted(pairs)]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(json.dumps({"between": named, **rule}).encode(), str(self._socket))

    def everywhere(self, **rule: Any) -> None:
        """Set the same rule between all namespaces."""
        for one, other in itertools.combinations(self.names, 2):
            self.between([one], [other], **rule)

    def inside(self, name: str, *command: str, before: str = "") -> list[str]:
        """Return ``command`` as one that runs in the namespace, on a machine of that name.

        ``before``: a line of shell to run first.
        """
        script = f'hostname {name}; {before or ":"}; exec "$@"'
        there = ["ip", "netns", "exec", self.namespace(name), "unshare", "--uts"]
        return [*there, "sh", "-c", script, "sh", *command]


class RayNodes:
    """A Ray node in each namespace of a network, the first one the head; each has its own Ray
    folder.
    """

    def __init__(self, network: Network, folder: Path, **environment: str):
        self._network, self._folder, self._environment = network, folder, environment
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.head = f"{network.addresses[network.names[0]]}:6379"

    def start(self, name: str, *options: str, **environment: str) -> None:
        """Run ``ray start`` in the namespace; returns at once."""
        own = self.ray_folder(name)
        own.mkdir(parents=True, exist_ok=True)
        where = ["--head", "--port=6379", "--include-dashboard=false"]
        if name != self._network.names[0]:
            where = [f"--address={self.head}"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *where]
        command += [f"--node-ip-address={self._network.addresses[name]}", *options]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        self._processes[name] = subprocess.Popen(
            self._network.inside(
                name, *command, before=f"mkdir -p /tmp/ray; mount --bind {own} /tmp/ray"
            ),
            env=clean | self._environment | environment,
            stdout=(self._folder / f"{name}.log").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def ray_folder(self, name: str) -> Path:
        """Return the folder that is /tmp/ray in the namespace."""
        return self._folder / name

    def kill(self, name: str, all_but: int | None = None) -> None:
        """Send SIGKILL to what ``ray start`` started, or to all processes of the namespace but
        one.
        """
        process = self._processes.pop(name)
        if all_but is not None:
            message = _ip("netns", "pids", self._network.namespace(name))
            for pid in map(int, message.split()):
                if pid not in (all_but, process.pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        if process.poll() is None:
            for each in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            process.kill()
        process.wait(30)

    def ended(self, name: str) -> bool:
        """Return True if ``ray start --block`` has returned, as it does when Ray gave the node
        up.
        """
        process = self._processes.get(name)
        return process is not None and process.poll() is not None

    def stop(self) -> None:
        """Stop all nodes."""
        for name in tuple(self._processes):
            self.kill(name)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert not done.returncode, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout
